"Where evaluations are given workers, no image of a test set is read by the main process, and the results are the same"

import os
from types import SimpleNamespace

import pytest
import torch

from vlrep.data.evaluation_batches import evaluation_processes
from vlrep.data.records import ArrayDataset
from vlrep.data.tasks import TaskDataset
from vlrep.data.tokenizer import Tokenizer
from vlrep.data.transforms import EvalTransform
from vlrep.datasets.world.dataset import world
from vlrep.evaluation.caption_content import caption_nll, derangement
from vlrep.evaluation.captioning import caption_scores
from vlrep.evaluation.finetune.results import decide_all
from vlrep.evaluation.masked_words.table import masked_word_table
from vlrep.experiments.config import get_recipe
from vlrep.methods.virtex.method import virtex_loss
from vlrep.methods.virtex.model import CaptioningModel
from vlrep.models.backbones import make_backbone
from vlrep.models.pretrained import Pretrained

SCENES = world('test', 70, size=24)
TOKENIZER = Tokenizer.train(SCENES.captions.flat(), vocab=120)


class Watched(ArrayDataset):
    "Notes in a file which processes read images"

    def images(self, idx):
        with open(self.readers, 'a') as file:
            file.write(f'{os.getpid()}\n')
        return super().images(idx)

    def subset(self, idx, split=None):
        some = super().subset(idx, split)
        some.__class__ = Watched
        some.readers = self.readers
        return some


@pytest.fixture
def data(tmp_path):
    data = Watched(SCENES.pixels, captions=SCENES.captions)
    data.readers = tmp_path / 'readers'
    return data


def captioner():
    torch.manual_seed(0)
    model = CaptioningModel(make_backbone(10, 8), len(TOKENIZER), width=32, heads=2).eval()

    def fill_mask(batch):
        scores = model.output(model.embed.words(batch['tokens'][:, 0]))
        if batch['images'] is None:  # the text alone
            return scores
        colours = batch['images'].mean((2, 3))  # the answers depend on the image
        return scores + colours @ torch.randn(3, scores.shape[1], generator=torch.Generator().manual_seed(0))

    capabilities = dict(
        caption=model.generate,
        fill_mask=fill_mask,
        masked_counts=lambda: torch.ones(len(TOKENIZER), dtype=torch.int64),
    )
    return model, Pretrained(model.visual, EvalTransform(24), 24, TOKENIZER, **capabilities)


def captions(data):
    return caption_scores(captioner()[1], data, draws=5)


def losses(data):
    model, m = captioner()
    shown = [range(len(data)), derangement(len(data))]
    return caption_nll(model, virtex_loss(get_recipe('virtex', 'world')), m, data, shown).tolist()


def masked_words(data):
    return masked_word_table(captioner()[1], data, n=100)


def decisions(data):
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, batch, text_only):
            return dict(logits=batch['images'].mean((2, 3)) * self.w)

    task = SimpleNamespace(decide=lambda scores, classes: scores.argmax(1).numpy())
    texts = [data.captions[i][0] for i in range(len(data))]
    examples = TaskDataset(data, range(len(data)), texts)
    examples.classes = list('rgb')
    return decide_all(Mean(), task, examples, lambda source, rows, *more: {}, bs=16).tolist()


@pytest.mark.parametrize('evaluation', [captions, losses, masked_words, decisions])
def test_workers_read_the_images(data, evaluation):
    alone = evaluation(data)
    assert set(data.readers.read_text().split()) == {str(os.getpid())}
    data.readers.unlink()
    with evaluation_processes(workers=1):
        assert evaluation(data) == alone
    assert data.readers.read_text() and str(os.getpid()) not in data.readers.read_text().split()
