"""The parts of ./run demo, without the model's package."""
import json
import math
import pathlib
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest

import flashattn
from demo import cascade, chart, encoder, growth, places

ROOT = pathlib.Path(__file__).resolve().parents[1]


def random_weights(generator):
    def tensor(*shape):
        return (generator.standard_normal(shape) * 0.1).astype(np.float32)

    weights = {"embeddings.word_embeddings.weight": tensor(50, 384),
               "embeddings.position_embeddings.weight": tensor(512, 384),
               "embeddings.token_type_embeddings.weight": tensor(2, 384)}
    sizes = {"embeddings.LayerNorm": (384,)}
    for i in range(encoder.LAYERS):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            sizes[f"{layer}.attention.{part}"] = (384, 384)
        sizes[f"{layer}.attention.output.LayerNorm"] = sizes[f"{layer}.output.LayerNorm"] = (384,)
        sizes[f"{layer}.intermediate.dense"] = (1536, 384)
        sizes[f"{layer}.output.dense"] = (384, 1536)
    for name, shape in sizes.items():
        weights[name + ".weight"], weights[name + ".bias"] = tensor(*shape), tensor(shape[0])
    return weights


def test_encoder_against_float64():
    generator = np.random.default_rng(1)
    weights = random_weights(generator)
    tokens = [list(generator.integers(0, 50, n)) for n in (1, 113, 7, 40)]
    got = encoder.Encoder(weights, np.float32).encode(tokens, places.HOST.flash)
    want = encoder.Encoder(weights, np.float64).encode(tokens, places.HOST.materialised)
    assert np.abs(got - want).max() < 2e-6
    alone = encoder.Encoder(weights, np.float32).encode(tokens[1:2], places.HOST.flash)
    assert np.abs(alone[0] - got[1]).max() < 1e-6  # packing mixes nothing


class OnPyTorch(places.Gpu):
    """What a GPU runs, in host memory."""

    def __init__(self, torch):
        super().__init__(torch, 0, "none")
        self.device = "cpu"

    def flash(self, q, k, v, cu_seqlens):
        return self.torch.from_numpy(super().flash(q, k, v, cu_seqlens))  # NumPy's there


def test_encoder_of_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    generator = np.random.default_rng(1)
    weights = random_weights(generator)
    tokens = [list(generator.integers(0, 50, n)) for n in (1, 113, 7, 40)]
    place = OnPyTorch(torch)
    model = encoder.Encoder(weights, np.float32, place)
    want = encoder.Encoder(weights, np.float64).encode(tokens, places.HOST.materialised)
    for attention in (place.flash, place.materialised):
        got = model.encode(tokens, attention)
        assert type(got) is np.ndarray and np.abs(got - want).max() < 2e-6


def test_place_is_the_cpu_in_the_librarys_words():
    if any(device.kind == "cuda" for device in flashattn.devices()):
        pytest.skip("this machine has a GPU")
    with pytest.raises(flashattn.UnsupportedError) as refused:
        flashattn.check(dtype="float32", heads_q=12, dim_qk=32, device="cuda")
    place, sentence = places.find()
    assert place is places.HOST and place.device is None
    assert sentence == f"On the CPU, not on a GPU: {refused.value}."


@pytest.mark.parametrize("torch, words", [
    (None, "need PyTorch"),
    (types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False)),
     "does not reach it"),
    (types.SimpleNamespace(
        __version__="2", cuda=types.SimpleNamespace(is_available=lambda: True),
        backends=types.SimpleNamespace(cuda=types.SimpleNamespace(
            matmul=types.SimpleNamespace(allow_tf32=True)))), "On the GPU: Some GPU, cuda:1;")])
def test_place_where_there_is_a_gpu(monkeypatch, torch, words):
    gpu = flashattn.DeviceInfo("cuda", 1, 132, 0, 90, "Some GPU", "", 232448, 50 << 20, 1 << 37)
    monkeypatch.setattr(flashattn, "devices", lambda: [gpu])
    monkeypatch.setattr(flashattn, "check", lambda **description: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    place, sentence = places.find()
    assert words in sentence
    assert place.device == ("cuda:1" if sentence.startswith("On the GPU") else None)
    assert place.device is None or not torch.backends.cuda.matmul.allow_tf32


def exact(q, cache, b, head):
    """One query in float64: o (DIM) and lse."""
    pages = cache.page_table[b]
    length = cache.prefix + cache.suffix[b]
    group = cascade.HEADS // cache.k.shape[2]
    k, v = (pool[pages].reshape(-1, *pool.shape[2:])[:length, head // group].astype(np.float64)
            for pool in (cache.k, cache.v))
    scores = k @ q[b, head].astype(np.float64) / math.sqrt(cascade.DIM)
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum(), scores.max() + math.log(weights.sum())


@pytest.mark.parametrize("heads_kv", [1, 2, 8])
def test_cascade_against_float64(heads_kv):
    """A shared prefix, read once, gives what reading it for every sequence gives."""
    q, cache = cascade.make(512, 9, heads_kv)
    for way in (cascade.cascade, cascade.whole):
        o, lse = way(q, cache)
        for b, head in ((0, 0), (4, 5), (8, 7)):
            want_o, want_lse = exact(q, cache, b, head)
            assert np.abs(o[b, head] - want_o).max() < 1e-5
            assert abs(lse[head, b] - want_lse) < 1e-5


def test_cascade_program(capsys):
    assert cascade.main(1024, 6) == 0
    assert "times as fast" in capsys.readouterr().out


@pytest.mark.parametrize("option, words", [
    (["--decode", "cpu", "2"], "32 of 32 tokens are those of the float64 reference"),
    (["--cascade", "cpu", "512", "5", "4"], "cascade differs from float64")])
def test_programs_in_c(option, words):
    if any(device.kind == "cuda" for device in flashattn.devices()) or shutil.which("nvidia-smi"):
        pytest.skip("where there is a GPU, ./run demo compiles its kernels")
    done = subprocess.run([ROOT / "run", "demo", *option], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr


def test_gelu():
    x = np.linspace(-12, 12, 4001)
    want = np.array([t * 0.5 * math.erfc(-t / math.sqrt(2)) for t in x])
    assert np.abs(places.Gelu(np.float64)(x) - want).max() < 1e-11


def test_data():
    data = json.loads((ROOT / "tests" / "data" / "passages.json").read_text(encoding="utf-8"))
    titles = [p["title"] for p in data["passages"]]
    assert len(set(titles)) == len(titles) >= 30
    assert all(q["expected"] in titles for q in data["questions"])
    assert all(p["text"] and p["author"] and p["year"] < 1930 for p in data["passages"])


def test_growth_and_chart(monkeypatch):
    generator = np.random.default_rng(2)
    source = generator.standard_normal((3, 1024, encoder.HEADS, encoder.DIM), np.float32)
    monkeypatch.setattr(growth, "LENGTHS", (256, 1024))
    monkeypatch.setattr(growth, "LIMIT", 20e6)
    rows = growth.measure(lambda length: list(source[:, :length]))
    assert rows[0].deviation < 1e-5 and rows[0].materialised.seconds > 0
    assert rows[1].materialised is None
    assert "stopped" in chart.table(rows) and len(chart.table(rows).splitlines()) == 4
    assert "1024" in chart.bars(rows)


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [growth.Row(512, growth.Cost(0.1, 1e6), growth.Cost(0.2, 2e7), 1e-6),
            growth.Row(1024, growth.Cost(0.4, 2e6), None, None)]
    assert chart.picture(rows, tmp_path / "a b" / "growth.png", "NumPy")
    assert (tmp_path / "a b" / "growth.png").read_bytes()[1:4] == b"PNG"
