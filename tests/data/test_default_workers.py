"How many workers read if nobody says so: by the cores of a process, and none where images are at hand"

import multiprocessing
import os
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from vlrep.data.evaluation_batches import evaluation_loader, evaluation_processes
from vlrep.data.loader import StatefulLoader, default_workers
from vlrep.data.records import ArrayDataset, ImageFileDataset
from vlrep.data.tasks import TaskDataset
from vlrep.datasets.detection.detection_set import DetectionSet
from vlrep.evaluation.detection.images import DetectionImages
from vlrep.experiments.spec import Runtime

FILES = ImageFileDataset([f'{i}.jpg' for i in range(9)], 16)
ARRAY = ArrayDataset(np.zeros((9, 16, 16, 3), np.uint8))


def questions(base):
    return TaskDataset(base, [0, 0, 1], ['why?'] * 3)


@pytest.fixture
def cores(monkeypatch):
    "Set how many cores this process may use, and how many processes share them"

    def choose(n, processes=None):
        monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(n)))
        monkeypatch.delenv('LOCAL_WORLD_SIZE', raising=False)
        if processes:
            monkeypatch.setenv('LOCAL_WORLD_SIZE', str(processes))

    return choose


def test_a_worker_a_core_is_shared_by_the_processes_of_a_machine(cores):
    "Two of two, eight of sixteen, none for one"
    for n, processes, workers in (
        (1, None, 0),
        (2, None, 2),
        (3, 1, 3),
        (16, None, 8),
        (2, 2, 0),
        (16, 4, 4),
        (96, 8, 8),
        (2, 8, 0),
    ):
        cores(n, processes)
        assert default_workers(FILES) == workers, (n, processes)


def test_images_at_hand_are_read_by_the_main_process(cores, monkeypatch, tmp_path):
    "Arrays, questions about them and drawn scenes have no workers, nor do processes that are no forks"
    cores(4)
    row = dict(id=1, file_name='1.jpg', width=9, height=9)
    files = DetectionSet('photos', tmp_path, [row], [], [])
    drawn = replace(files, draw=lambda row: Image.new('RGB', (9, 9)))
    for source in ARRAY, questions(ARRAY), DetectionImages(drawn):
        assert default_workers(source) == 0
    for source in questions(FILES), DetectionImages(files):
        assert default_workers(source) == 4
    monkeypatch.setattr(multiprocessing, 'get_start_method', lambda allow_none: 'spawn')
    assert default_workers(FILES) == 0


def test_the_default_reaches_training_and_evaluation_and_a_number_overrides_it(cores):
    "`workers=None` is what commands have without `--workers`"
    cores(4)
    assert Runtime().workers is None
    for workers, expected in (None, 4), (0, 0), (1, 1):
        assert StatefulLoader(FILES, 4, workers=workers).workers == expected
        with evaluation_processes(workers):
            assert evaluation_loader(FILES, bs=4).workers == expected
            assert evaluation_loader(FILES, bs=9).workers == 0  # a single batch
            assert evaluation_loader(ARRAY, bs=4).workers == (workers or 0)
    assert StatefulLoader(ARRAY, 4, workers=None).workers == 0
