"""VisualBERT against transformers' own: states, loss, gradients, and what it saves; fusion models as runs

What the parts are is checked in nbs/models/59_fusion_encoder, 64_fusion_model and nbs/methods/06_fusion_collate.
"""

import statistics
import time

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from vlrep.core.files import write_json
from vlrep.data.pair_masking import mask_words
from vlrep.data.wordpiece import WordPieceTokenizer
from vlrep.experiments.commands import evaluate, export
from vlrep.experiments.pretrain import pretrain
from vlrep.experiments.spec import run_spec
from vlrep.models.bert_weights import load_bert
from vlrep.models.fusion_encoder import FusionConfig
from vlrep.models.fusion_model import FusionModel
from vlrep.models.sublayers import single_stream
from vlrep.training.run_folder import open_run_folder


class Given(torch.nn.Module):
    "Features are in the batch"

    visual = None
    classes = 0

    def __init__(self, width):
        super().__init__()
        self.width = width


def both(folder, vocab, width, depth, heads, feats, max_len=40):
    "A random VisualBERT of transformers, and ours with the same weights"
    torch.manual_seed(0)
    config = transformers.VisualBertConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=max_len,
        visual_embedding_dim=feats,
    )
    theirs = transformers.VisualBertForPreTraining(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn(p.shape) * 0.05)  # biases and norms that do something
    state = {
        k.replace('visual_bert.', 'bert.'): v.contiguous().clone()
        for k, v in theirs.state_dict().items()
        if 'visual_' not in k.removeprefix('visual_bert.') and 'decoder' not in k
    }
    folder.mkdir()
    write_json(
        folder / 'config.json',
        dict(
            transformers.BertConfig(
                **{
                    k: getattr(config, k)
                    for k in (
                        'vocab_size',
                        'hidden_size',
                        'num_hidden_layers',
                        'num_attention_heads',
                        'intermediate_size',
                        'max_position_embeddings',
                    )
                }
            ).to_dict()
        ),
    )
    save_file(state, folder / 'model.safetensors', {'format': 'pt'})
    words = '[PAD] [UNK] [CLS] [SEP] [MASK]'.split() + [f'w{i}' for i in range(vocab - 5)]
    ours = FusionModel(
        load_bert(folder, log=None),
        FusionConfig(single_stream(depth, heads), width, 4 * width),
        Given(feats),
        WordPieceTokenizer(words),
    ).eval()
    e = theirs.visual_bert.embeddings
    with torch.no_grad():
        ours.regions_in.project.load_state_dict(e.visual_projection.state_dict())
        ours.regions_in.position.copy_(e.visual_position_embeddings.weight[0])
        ours.regions_in.segment.copy_(e.visual_token_type_embeddings.weight[0])
    return theirs, ours


def batch(vocab, feats, b=5, s=14, n=6):
    "Texts with segments and regions, both of unequal length"
    g = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, s + 1, (b,), generator=g)
    counts = torch.randint(1, n + 1, (b,), generator=g)
    lengths[0], counts[0] = s, n
    tokens = torch.randint(5, vocab, (b, s), generator=g)
    tokens[:, 0] = 2
    tokens[torch.arange(b), lengths - 1] = 3
    real = torch.arange(s) < lengths[:, None]
    x = torch.rand(b, n, 2, generator=g) * 0.5
    return dict(
        tokens=tokens.masked_fill(~real, 0),
        lengths=lengths,
        segments=((torch.arange(s) > 5) & real).long(),
        region_feats=torch.randn(b, n, feats, generator=g),
        region_counts=counts,
        region_boxes=torch.cat([x, x + 0.4], -1),
        salt=torch.arange(b) * 17 + 3,
    )


def asked(theirs, x, seen, want):
    "What transformers' model computes: scores for every place of words and regions"
    s = x['tokens'].shape[1]
    n = x['region_feats'].shape[1]
    real = torch.arange(s) < x['lengths'][:, None]
    present = torch.arange(n) < x['region_counts'][:, None]
    none = torch.full(present.shape, -100)
    kinds = torch.zeros_like(none)
    return theirs(
        input_ids=seen,
        attention_mask=real.float(),
        token_type_ids=x['segments'],
        visual_embeds=x['region_feats'],
        visual_attention_mask=present.float(),
        visual_token_type_ids=kinds,
        labels=torch.cat([want.where(want >= 0, -100), none], 1),
    )


def grads(m):
    return {k: p.grad for k, p in m.named_parameters() if p.grad is not None}


def test_states_loss_and_gradients_are_those_of_transformers(tmp_path):
    theirs, ours = both(tmp_path / 'vb', 80, 32, 3, 4, 10)
    x = batch(80, 10)
    seen, want = mask_words(x['tokens'], x['lengths'], x['salt'], ours.tokenizer, 0.3)
    ours.heads = type(ours.heads)(share=0.3)
    a = ours(x)
    b = asked(theirs, x, seen, want)
    s = x['tokens'].shape[1]
    assert len(a['target']) > 5
    torch.testing.assert_close(a['logits'], b.prediction_logits[:, :s][want >= 0], rtol=0, atol=1e-5)
    loss = F.cross_entropy(a['logits'], a['target'])
    torch.testing.assert_close(loss, b.loss, rtol=0, atol=1e-5)
    loss.backward()
    b.loss.backward()
    mine = grads(ours)
    other = grads(theirs)
    e = 'visual_bert.embeddings.'
    pairs = {
        'bert.words.weight': e + 'word_embeddings.weight',
        'bert.positions.weight': e + 'position_embeddings.weight',
        'bert.segments.weight': e + 'token_type_embeddings.weight',
        'bert.norm.weight': e + 'LayerNorm.weight',
        'regions_in.project.weight': e + 'visual_projection.weight',
        'bert.bias': 'cls.predictions.bias',
        'bert.transform.weight': 'cls.predictions.transform.dense.weight',
    }
    for k, o in pairs.items():
        torch.testing.assert_close(mine[k], other[o], rtol=0, atol=1e-5, msg=k)
    for k, o in dict(position='visual_position', segment='visual_token_type').items():
        torch.testing.assert_close(mine[f'regions_in.{k}'], other[f'{e}{o}_embeddings.weight'][0], rtol=0, atol=1e-5)
    for i in range(3):
        at = f'visual_bert.encoder.layer.{i}.'
        qkv = torch.cat([other[f'{at}attention.self.{k}.weight'] for k in ('query', 'key', 'value')])
        half = f'encoder.layers.{i}.halves.both.'
        for k, o in (
            ('project.weight', qkv),
            ('linear1.bias', other[f'{at}intermediate.dense.bias']),
            ('norm2.weight', other[f'{at}output.LayerNorm.weight']),
        ):
            torch.testing.assert_close(mine[half + k], o, rtol=0, atol=1e-5, msg=half + k)
    out = ours.fuse({**x, 'tokens': seen})
    pooled = theirs.visual_bert(
        input_ids=seen,
        attention_mask=(torch.arange(s) < x['lengths'][:, None]).float(),
        token_type_ids=x['segments'],
        visual_embeds=x['region_feats'],
        visual_attention_mask=(torch.arange(6) < x['region_counts'][:, None]).float(),
        visual_token_type_ids=torch.zeros(5, 6, dtype=torch.int64),
    ).pooler_output
    torch.testing.assert_close(out['pooled'], pooled, rtol=0, atol=1e-5)


def paired(theirs, ours, x, n=7):
    "Times of a step in pairs, theirs over ours, and their numbers of scores over ours, on the same batch"
    seen, want = mask_words(x['tokens'], x['lengths'], x['salt'], ours.tokenizer)
    sizes = {}

    def one():
        out = ours(x)
        sizes['ours'] = out['logits'].numel()
        F.cross_entropy(out['logits'], out['target']).backward()

    def other():
        out = asked(theirs, x, seen, want)
        sizes['theirs'] = out.prediction_logits.numel()
        out.loss.backward()

    def seconds(f):
        start = time.process_time()
        f()
        return time.process_time() - start

    pairs = [(seconds(other), seconds(one)) for _ in range(n)][1:]
    return statistics.median(a / b for a, b in pairs), sizes['theirs'] / sizes['ours']


def test_scores_at_masked_places_alone_save_time_and_memory(tmp_path):
    """A step of training in at most 1/1.2 of the time, scores in at most a fifth of the memory

    The proportions are BERT-base's: scores cost as much beside the layers as 30,522 words do at width 768. Texts and
    regions are of unequal length, as in training; where all places are filled, less is won
    """
    vocab = 2544
    width = 384
    depth = 2
    s = 128
    n = 100
    theirs, ours = (m.train() for m in both(tmp_path / 'vb', vocab, width, depth, 6, 64, 130))
    x = batch(vocab, 64, 4, s, n)
    x['tokens'] = torch.randint(5, vocab, (4, s), generator=torch.Generator().manual_seed(2))
    torch.set_num_threads(1)
    full = {k: v[:2] for k, v in x.items()} | dict(lengths=torch.full((2,), s), region_counts=torch.full((2,), n))
    got = dict(unequal=paired(theirs, ours, x), full=paired(theirs, ours, full))
    for k, (ratio, memory) in got.items():
        print(f'{k}: a step {ratio:.2f} times as fast, scores {memory:.1f} times smaller')
    assert got['unequal'][0] > 1.2 and got['full'][0] > 1.05 and min(m for _, m in got.values()) > 5


SMALL = [
    'scenes=64',
    'valid=16',
    'shown=40',
    'probe=40',
    'probe_held=40',
    'test=40',
    'point=0',
    'baselines=false',
    'size=32',
    'visual_depth=10',
    'visual_width=8',
    'width=16',
    'heads=2',
    'depth=1',
    'vocab=200',
    'bs=16',
    'steps=3',
    'warmup=1',
]


def test_a_run_reads_captions_that_another_run_wrote(tmp_path):
    "Captions of a captioner's run beside the twins, and what the fusion uses is in the result and can be asked again"
    how = dict(threads=1, precision='fp32')
    writer = pretrain(run_spec('captioning', SMALL, **how), out=tmp_path / 'writer', log=str)
    wrote = ['source=generated', 'aux_scenes=0', f'generated={writer}']
    run = pretrain(run_spec('visualbert', [*SMALL, *wrote], **how), out=tmp_path / 'run', log=str)
    numbers = open_run_folder(run).results()[-1]['numbers']
    rows = {(r['metric'], r['backbone']): r['value'] for r in numbers['image_ablation']}
    assert len(rows) == 10 and numbers['images'] == 64 and 'table' not in numbers
    again = {(r['metric'], r['backbone']): r['value'] for r in evaluate(run, 'image_ablation', log=lambda s: None)}
    assert again == pytest.approx(rows)
    with pytest.raises(ValueError, match='has no capability backbone, which --on world needs'):
        evaluate(run, 'world', log=lambda s: None)
    with pytest.raises(ValueError, match='has no backbone of its own'):
        export(run, 'torchvision', tmp_path / 'net')
    with pytest.raises(ValueError, match='cannot write captions'):
        pretrain(
            run_spec('visualbert', [*SMALL, *wrote[:2], f'generated={run}'], **how), out=tmp_path / 'mute', log=str
        )
