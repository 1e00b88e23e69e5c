"""Transformers' models on this library: tiny ones of the real classes with random weights, beside
Transformers' own "eager" attention. tests/torch_setup.py installs two versions of Transformers."""
import copy
import inspect

import pytest
import torch

import flashattn.torch as fa
import reference
from flashattn.torch import transformers as ours

hf = pytest.importorskip("transformers", reason="no Transformers installed")
masking = pytest.importorskip("transformers.masking_utils", reason="Transformers is too old")
MAJOR = int(hf.__version__.split(".")[0])
VOCABULARY, TOKENS = 99, 20
SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, bos_token_id=1,
             eos_token_id=98, pad_token_id=0, max_position_embeddings=128)


def llama():
    return hf.LlamaForCausalLM, hf.LlamaConfig(**SIZES)


def mistral():
    return hf.MistralForCausalLM, hf.MistralConfig(**SIZES, sliding_window=6)


def gemma2():
    """Softcap, and a window in every other layer."""
    return hf.Gemma2ForCausalLM, hf.Gemma2Config(
        **SIZES, sliding_window=6, attn_logit_softcapping=5.0, query_pre_attn_scalar=16)


def gemma3():
    return hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(
        **SIZES, sliding_window=6, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"])


def gpt_oss():
    """Sinks."""
    experts = {} if MAJOR < 5 else {"experts_implementation": "eager"}  # any type of number
    return hf.GptOssForCausalLM, hf.GptOssConfig(
        **SIZES, **experts, sliding_window=6, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"])


def bert():
    return hf.BertForMaskedLM, hf.BertConfig(
        **{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")},
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def t5():
    """A position bias, learned."""
    return hf.T5ForConditionalGeneration, hf.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=98)


def whisper():
    return hf.WhisperForConditionalGeneration, hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, max_source_positions=30, max_target_positions=60, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=98, decoder_start_token_id=2)


DECODERS = [llama, mistral, gemma2, gemma3, gpt_oss]
OTHERS = [bert, t5, whisper]
CALLS = {t5: 6, whisper: 6}  # encoder, decoder, cross; two layers each
needs_interface = pytest.mark.skipif(MAJOR < 5, reason="of 4.x these models have no interface")


def every(*makers):
    return pytest.mark.parametrize("make", [pytest.param(
        make, id=make.__name__, marks=needs_interface if make in (bert, t5) else ())
        for make in makers])


def exact_attention(module, query, key, value, attention_mask, scaling=None, softcap=None,
                    s_aux=None, position_bias=None, **_):
    """Every score stored, in float64. Unlike in eager attention a query that sees no key gives 0,
    which later layers do not take for NaN."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None
                                              else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num()[..., :key.shape[2]]
    return (weights @ value).transpose(1, 2), None


def exact(eager):
    """The model in float64."""
    hf.AttentionInterface.register("exact", exact_attention)
    masking.AttentionMaskInterface.register("exact", lambda **given: masking.sdpa_mask(
        **{**given, "allow_is_causal_skip": False}))
    model = copy.deepcopy(eager).double()
    model.set_attn_implementation("exact")
    return model


def pair(make, device, dtype=torch.float32):
    """The same model by eager attention and by ours."""
    kind, config = make()
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    eager = kind(config).to(device, dtype).eval()
    for name, parameter in eager.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    mine = copy.deepcopy(eager)
    mine.set_attn_implementation(fa.register_transformers())
    if any(module.config._attn_implementation != "libfa" for module in mine.modules()
           if isinstance(module, hf.PreTrainedModel)):
        # Parts with copies of the config, as T5's in 5.17: only a model that is made with it will
        # do.
        config = copy.deepcopy(config)
        config._attn_implementation = "libfa"
        mine = kind(config).to(device, dtype).eval()
        mine.load_state_dict(eager.state_dict())
    return eager, mine


def batch(make, padding, device):
    """Inputs, and where their results count."""
    ids = torch.randint(3, VOCABULARY - 1, (3, TOKENS), device=device)
    seen = torch.ones_like(ids)
    for row, missing in enumerate((0, 3, 9)):
        if padding == "left":
            seen[row, :missing] = 0
        elif padding == "right" and missing:
            seen[row, -missing:] = 0
    ids = torch.where(seen.bool(), ids, 0)
    if make is whisper:
        sound = torch.randn(3, 8, 60, device=device)
        return dict(input_features=sound, decoder_input_ids=ids,
                    decoder_attention_mask=None if padding == "none" else seen), seen.bool()
    inputs = dict(input_ids=ids, attention_mask=None if padding == "none" else seen)
    if make is t5:
        inputs["decoder_input_ids"] = torch.randint(3, 98, (3, 11), device=device)
        seen = torch.ones(3, 11, device=device)
    return inputs, seen.bool()


def cast(inputs, dtype):
    return {name: value.to(dtype) if value is not None and value.is_floating_point() else value
            for name, value in inputs.items()}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@every(*DECODERS, *OTHERS)
def test_logits(device, make, padding):
    """Errors are at most twice those of eager attention; the report says who computed."""
    eager, mine = pair(make, device)
    inputs, seen = batch(make, padding, device)
    with torch.no_grad():
        naive = eager(**inputs).logits[seen]
        before = fa.report()["forward"]
        got = mine(**inputs).logits[seen]
        assert fa.report()["forward"] - before == CALLS.get(make, 2)
        truth = exact(eager)(**cast(inputs, torch.float64)).logits[seen]
    reference.check([got], [truth], [naive], ["logits"])


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_bert_under_activate(padding):
    """The way of BERT of 4.x. On CPUs: torch gives float masks on GPUs to other kernels."""
    kind, config = bert()
    models = []
    for name in ("eager", "sdpa"):
        config._attn_implementation = name
        torch.manual_seed(1)
        models.append(kind(copy.deepcopy(config)).eval())
    inputs, seen = batch(bert, padding, "cpu")
    wants = [loss_of(models[0], inputs, seen)]
    wants += torch.autograd.grad(wants[0], models[0].bert.encoder.parameters())
    before = fa.report()
    fa.activate()
    try:
        got = [loss_of(models[1], inputs, seen)]
        got += torch.autograd.grad(got[0], models[1].bert.encoder.parameters())
    finally:
        fa.restore()
    after = fa.report()
    assert [after[name] - before[name] for name in ("forward", "backward")] == [2, 2]
    assert after["refused"] == before["refused"]
    torch.testing.assert_close(got, wants, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(MAJOR > 4, reason="T5 of 5.x has an interface, which test_logits uses")
def test_t5_of_4_has_eager_attention_alone():
    """register_transformers() says so."""
    kind, config = t5()
    with pytest.raises(ValueError, match="T5ForConditionalGeneration does not support"):
        kind._from_config(config, attn_implementation="sdpa")
    model = kind._from_config(config, attn_implementation=fa.register_transformers())
    before = fa.report()["forward"]
    model(**batch(t5, "none", "cpu")[0])
    assert fa.report()["forward"] == before


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@every(*DECODERS, *OTHERS[1:])
def test_generate(device, make, cache):
    """The same tokens as by eager attention, from a batch that is padded at the left."""
    eager, mine = pair(make, device)
    inputs, _ = batch(make, "none" if make is whisper else "left", device)
    inputs = {name: value for name, value in inputs.items()
              if not name.startswith("decoder") and value is not None}
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)
    if cache == "static":
        options["cache_implementation"] = "static"
    with torch.no_grad():
        want, got = (model.generate(**inputs, **options) for model in (eager, mine))
    assert got.shape[1] >= 24 and torch.equal(got, want)


def loss_of(model, inputs, seen):
    logits = model(**inputs).logits[seen]
    wanted = torch.arange(logits.shape[0], device=logits.device) % VOCABULARY
    return torch.nn.functional.cross_entropy(logits, wanted)


@every(*DECODERS, *OTHERS)
def test_training_steps(device, make):
    """Losses and weights of three steps are those of eager attention."""
    models = pair(make, device)
    inputs, seen = batch(make, "right", device)
    losses, before = [], fa.report()["backward"]
    for model in models:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, inputs, seen)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert fa.report()["backward"] - before == 3 * CALLS.get(make, 2)
    assert losses[0][2] < losses[0][0]
    torch.testing.assert_close(*[torch.tensor(each) for each in losses], atol=1e-5, rtol=1e-5)
    for (name, want), got in zip(models[0].named_parameters(), models[1].parameters()):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-3,
                                   msg=lambda m, n=name: f"{n} {m}")


@pytest.mark.parametrize("told", [False, True], ids=["positions", "lengths"])
@every(*DECODERS)
def test_packed(device, make, told):
    """Sequences in one row, by their positions or by the flattening collator's arguments, are as
    each alone; so are the gradients. Transformers' gpt-oss gives no positions to its masks: by
    these alone eager attention, too, takes a row for one sequence."""
    eager, mine = pair(make, device)
    lengths = (7, 4, 12)
    ids = torch.randint(3, 98, (1, sum(lengths)), device=device)
    inputs = dict(input_ids=ids, use_cache=False, position_ids=torch.cat(
        [torch.arange(n) for n in lengths])[None].to(device))
    if told:
        cu = torch.tensor([0, 7, 11, 23], dtype=torch.int32, device=device)
        inputs.update(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=12, max_length_k=12)
    got = mine(**inputs).logits[0]
    if make is gpt_oss and not told:
        wants = eager(**inputs).logits[0]
    else:
        wants = torch.cat([eager(input_ids=part).logits[0] for part in ids.split(lengths, dim=1)])
    torch.testing.assert_close(got, wants, atol=1e-5, rtol=1e-4)
    got.square().sum().backward()
    wants.square().sum().backward()
    for want, have in zip(eager.parameters(), mine.parameters()):
        torch.testing.assert_close(have.grad, want.grad, atol=1e-3, rtol=1e-3)


def test_bfloat16(device):
    eager, mine = pair(llama, device, torch.bfloat16)
    inputs, seen = batch(llama, "left", device)
    with torch.no_grad():
        truth = exact(eager)(**inputs).logits[seen]
        got, naive = (model(**inputs).logits[seen] for model in (mine, eager))
    reference.check([got], [truth], [naive], ["logits"])


def test_compile(device):
    """Forward and backward of a model as one graph."""
    torch._dynamo.reset()
    eager, mine = pair(llama, device)
    inputs, _ = batch(llama, "none", device)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    got = compiled(input_ids=inputs["input_ids"], use_cache=False).logits
    want = eager(input_ids=inputs["input_ids"]).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    got.sum().backward()
    assert all(p.grad is not None for p in mine.model.layers.parameters())


def small_mask(config, padding, tokens=64):
    config._attn_implementation = fa.register_transformers()
    embeds = torch.empty(2, tokens, 64)
    seen = torch.ones(2, tokens, dtype=torch.int64)
    if padding:
        seen[1, :5] = 0
    make = (masking.create_sliding_window_causal_mask if getattr(config, "sliding_window", None)
            else masking.create_causal_mask)
    given = {"cache": None, "past_key_values": None, "inputs_embeds": embeds,
             "input_embeds": embeds, "cache_position": torch.arange(tokens)}
    known = inspect.signature(make).parameters  # other names in other versions
    return make(config=config, attention_mask=seen, position_ids=None,
                **{name: value for name, value in given.items() if name in known})


@every(llama, mistral)
@pytest.mark.parametrize("padding", [False, True])
def test_masks_are_small(make, padding):
    """No number for each pair of tokens."""
    mask = small_mask(make()[1], padding)
    if make is llama and not padding:
        assert mask is None
    else:
        assert mask.shape[:3] == (2 if padding else 1, 1, 1)
        assert mask.untyped_storage().nbytes() <= 2 * 64


def test_other_masks_are_transformers_own():
    """An unknown mask function is not taken for one that is known."""
    fa.register_transformers()
    options = dict(batch_size=2, kv_length=16, kv_offset=0, attention_mask=None)
    if MAJOR > 4:
        options.update(q_length=16, q_offset=0)
    else:
        options.update(cache_position=torch.arange(16))
    own = masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: k < 3)
    chunks = masking.and_masks(masking.sliding_window_overlay(4), own)
    for function in (own, chunks):
        got = ours.mask(mask_function=function, allow_is_causal_skip=False, **options)
        want = masking.sdpa_mask(mask_function=function, allow_is_causal_skip=False, **options)
        assert got.shape[-2:] == (16, 16) and torch.equal(got, want)


def test_refusals():
    q = torch.randn(1, 2, 8, 16)
    layer = torch.nn.Identity()
    window = torch.ones(1, 1, 1, 1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="Identity has a mask with a sliding window"):
        ours.attention(layer, q, q, q, window)
    with pytest.raises(NotImplementedError, match="head_mask"):
        ours.attention(layer, q, q, q, None, head_mask=torch.ones(2))
    with pytest.raises(NotImplementedError, match="continuous batching"):
        ours.attention(layer, q, q, q, None, cache=object())
    with pytest.raises(ValueError, match="\"flash\" in it"):
        fa.register_transformers("flashattn")
    assert fa.register_transformers() == fa.register_transformers("libfa") == "libfa"
