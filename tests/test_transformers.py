"""Models of Hugging Face transformers with cuseq for causal_conv1d, against their own torch path.

transformers decides once, at import, what it convolves with. So a process of its own runs every
model with cuseq provided, and another one, with the same weights and inputs, without causal_conv1d.
What transformers would take for the scans (mamba_ssm, fla) is hidden from both: the convolutions
are all that differs. With CUSEQ_TRANSFORMERS_DEVICE=cpu all of it runs on the CPU.
"""

import functools
import os
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

DEVICE = os.environ.get("CUSEQ_TRANSFORMERS_DEVICE", "cuda")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []

ROOT = Path(__file__).resolve().parents[1]
OLDEST = "5.17"  # in which transformers is known to take causal_conv1d without mamba_ssm
HIDDEN_MODULES = "mamba_ssm", "fla", "kernels"

BATCH, VOCABULARY, TRAINED, GENERATED = 2, 64, 13, 12
PROMPTS = [9, 2]  # lengths; the second is shorter than any filter
PACKED = [5, 1, 2, 7]  # lengths of the sequences in one row

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,  # more, and bfloat16's roundings grow; less, and tokens hardly count
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,  # nothing ends a generation early
}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
MAMBA = {"state_size": 8}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
# Two experts, both taken: rounding never changes which.
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2}
MODELS = {
    "mamba": MAMBA,
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "falcon_mamba": MAMBA,
    "jamba": ATTENTION
    | EXPERTS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "bamba": ATTENTION | MAMBA2 | {"attn_layer_indices": [1]},
    "zamba2": ATTENTION
    | {
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "chunk_size": 8,
    },
    "falcon_h1": ATTENTION | MAMBA2 | {"mamba_d_ssm": 64},
    "granitemoehybrid": ATTENTION
    | MAMBA2
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "nemotron_h": ATTENTION
    | {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "lfm2": ATTENTION
    | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_next": ATTENTION
    | EXPERTS
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}
# Models whose sequences seq_idx keeps apart, and the scan, if any, that they hand it to besides the
# convolution. Those of mamba and jamba take none, and mamba2 hands none on.
TAKES_PACKED = {
    "bamba": "mamba2_chunk_scan",
    "zamba2": "mamba2_chunk_scan",
    "falcon_h1": "mamba2_chunk_scan",
    "granitemoehybrid": "mamba2_chunk_scan",
    "nemotron_h": "mamba2_chunk_scan",
    "lfm2": None,
    "qwen3_next": "torch_chunk_gated_delta_rule",
}


class Tolerance(NamedTuple):
    """How far an array may be off, as the norm of the error by the norm of the array."""

    value: float
    reason: str


TOLERANCES = {  # "seen": on the CPU, over three seeds, with transformers 5.17 and 5.24
    ("value", "float32"): Tolerance(
        4e-6, "7e-7 seen: a dozen roundings of 2^-24, as sums are taken in another order"
    ),
    ("gradient", "float32"): Tolerance(
        3e-5, "5e-6 seen: norms of small vectors and steep scans make 90 roundings of one"
    ),
    ("value", "bfloat16"): Tolerance(
        5e-2, "1.6e-2 seen: torch rounds to 2^-8 before SiLU as well, cuseq only after it"
    ),
    ("gradient", "bfloat16"): Tolerance(
        0.4, "0.18 seen: 46 roundings of 2^-8, made as in float32, which is the sharper test"
    ),
}


# The process that runs the models:


def main(variant, dtype, result, reference=None):
    """Run every model and save what it gave: {model: {name: tensor}}, or {"error": text}.

    variant: "torch" or "cuseq"; the saved result of the former is the reference of the latter.
    """
    hidden = HIDDEN_MODULES if variant == "cuseq" else (*HIDDEN_MODULES, "causal_conv1d")
    sys.modules |= dict.fromkeys(hidden)  # whoever imports None gets an ImportError
    calls = Counter()
    if variant == "cuseq":
        provide_counted(calls)
    from transformers import CONFIG_MAPPING, logging

    logging.set_verbosity_error()
    torch.set_num_threads(1)  # to share out so little work costs more than the work
    torch.backends.cudnn.allow_tf32 = False  # else torch convolves float32 with 11 bits
    along = torch.load(reference) if reference else {}
    results = {}
    for name in MODELS:
        if name in CONFIG_MAPPING:
            try:
                results[name] = run(name, getattr(torch, dtype), along.get(name, {}), calls)
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    assert ("cuseq" in sys.modules) == (variant == "cuseq")
    torch.save(results, result)


def provide_counted(calls):
    """Provide cuseq's functions; their calls are counted by name, and those with seq_idx."""
    import cuseq.compat
    from cuseq.compat import causal_conv1d

    def counted(function):
        @functools.wraps(function)  # transformers looks at its signature
        def call(*args, **options):
            calls[function.__name__] += 1
            calls["seq_idx"] += options.get("seq_idx") is not None
            return function(*args, **options)

        return call

    for name in "causal_conv1d_fn", "causal_conv1d_update":
        setattr(causal_conv1d, name, counted(getattr(causal_conv1d, name)))
    cuseq.compat.provide("causal_conv1d")


def run(name, dtype, along, calls):
    """The results of a model, "case: name"; "case: calls" is what it called of cuseq for them."""
    model = random_model(name).to(DEVICE, dtype)
    found = {f"weights: {key}": w.detach().cpu().clone() for key, w in model.named_parameters()}

    def case(key, function, *args):
        calls.clear()
        results = function(model.eval(), *args)
        found.update({f"{key}: {what}": x.detach().cpu() for what, x in results.items()})
        found[f"{key}: calls"] = dict(calls)

    case("training", train, tokens(BATCH, TRAINED))
    for L in PROMPTS:
        case(f"prefill {L}", prefill, tokens(BATCH, L))
        greedy = along.get(f"generation {L}: tokens")
        case(f"generation {L}", generate, tokens(BATCH, L), greedy)
    if name in TAKES_PACKED:  # what the reference gives has nothing to go along with
        case("packed", packed if along else one_by_one, tokens(1, sum(PACKED)))
    return found


def random_model(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **COMMON | MODELS[name])
    model = AutoModelForCausalLM.from_config(config)
    for weight_name, weight in model.named_parameters():
        if "conv" in weight_name and weight.ndim in (1, 3):
            torch.nn.init.normal_(weight, std=0.5)  # some biases would be 0
    return model


def tokens(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(VOCABULARY, shape, generator=generator).to(DEVICE)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {f"grad {name}": w.grad for name, w in model.named_parameters() if w.grad is not None}


def train(model, ids):
    loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
    return {"loss": loss} | gradients(model, loss)


@torch.no_grad()
def prefill(model, ids):
    return {"logits": model(input_ids=ids, use_cache=True).logits}


def generate(model, ids, greedy):
    """Greedy tokens and their logits. Where `greedy` is given, it goes on with those tokens."""
    options = {}
    if greedy is not None:
        options["prefix_allowed_tokens_fn"] = lambda row, seen: [int(greedy[row, len(seen)])]
    output = model.generate(
        ids,
        max_new_tokens=GENERATED,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    logits = torch.stack(output.logits, dim=1)
    return {"tokens": torch.cat([ids, logits.argmax(dim=-1)], dim=1), "logits": logits}


def packed(model, ids):
    """Sequences in one row, as DataCollatorWithFlattening packs them; none may see another."""
    lengths = torch.tensor(PACKED, device=DEVICE)
    seq_idx = torch.arange(len(PACKED), device=DEVICE).repeat_interleave(lengths)[None]
    options = {
        "position_ids": torch.cat([torch.arange(L, device=DEVICE) for L in PACKED])[None],
        "attention_mask": (seq_idx[:, :, None] == seq_idx[:, None]).tril()[:, None],
        "seq_idx": seq_idx.int(),
    }
    scan = TAKES_PACKED[model.config.model_type]
    if scan is None:
        logits = model(input_ids=ids, use_cache=False, **options).logits
    else:
        module = sys.modules[type(model).__module__]
        with mock.patch.object(module, scan, sequence_by_sequence(getattr(module, scan))):
            logits = model(input_ids=ids, use_cache=False, **options).logits
    return with_gradients(model, ids, logits)


def sequence_by_sequence(scan):
    """A scan of packed sequences out of transformers' in torch, which refuses them.

    The axes of its tensors begin with (B, L) where there are more than two.
    """

    def parts(x):
        return x.split(PACKED, dim=1) if torch.is_tensor(x) and x.ndim > 2 else [x] * len(PACKED)

    def scans(*args, seq_idx, **options):
        assert seq_idx is not None
        outputs = []
        for s in range(len(PACKED)):
            own = {name: parts(x)[s] for name, x in options.items()}
            outputs.append(scan(*[parts(x)[s] for x in args], **own))
        if isinstance(outputs[0], tuple):  # and a state, which nobody asked for
            return torch.cat([y for y, _ in outputs], dim=1), None
        return torch.cat(outputs, dim=1)

    return scans


def one_by_one(model, ids):
    """What `packed` has to give: each sequence in a call of its own."""
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(PACKED, dim=1)]
    return with_gradients(model, ids, torch.cat(parts, dim=1))


def with_gradients(model, ids, logits):
    loss = torch.nn.functional.cross_entropy(logits[0].float(), ids[0])
    return {"logits": logits} | gradients(model, loss)


# The tests:


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def results(request, tmp_path_factory):
    """dtype, results without causal_conv1d, results with cuseq."""
    transformers = pytest.importorskip("transformers", minversion=OLDEST)
    dtype, folder = request.param, tmp_path_factory.mktemp("transformers")
    files = [str(folder / f"{variant}.pt") for variant in ("torch", "cuseq")]
    for arguments in ("torch", dtype, files[0]), ("cuseq", dtype, files[1], files[0]):
        command = [sys.executable, "-m", "tests.test_transformers", *arguments]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return dtype, transformers.__version__, *map(torch.load, files)


every_model = pytest.mark.parametrize("name", MODELS)


def compared(results, name, case):
    """The results of a case with cuseq and without, by name. Those that are floats are compared."""
    dtype, version, wanted, got = results
    if name not in wanted:
        pytest.skip(f"transformers {version} has no {name}")
    for found in wanted[name], got[name]:
        assert "error" not in found, found["error"]
    weights = [of_case(found[name], "weights").values() for found in (wanted, got)]
    assert all(map(torch.equal, *weights)), "the processes began with different weights"
    got, wanted = of_case(got[name], case), of_case(wanted[name], case)
    assert got.keys() == wanted.keys()
    assert wanted["calls"] == {}
    errors = {}
    for key, array in wanted.items():
        if torch.is_tensor(array) and array.is_floating_point():
            assert got[key].dtype == array.dtype
            allowed = TOLERANCES["gradient" if key.startswith("grad ") else "value", dtype]
            norm = torch.linalg.norm(array.double())
            error = torch.linalg.norm(got[key].double() - array.double())
            if not error <= allowed.value * norm:  # NaN is no small error
                errors[key] = f"off by {error / norm:.2g}, allowed {allowed}"
    assert not errors
    return got, wanted


def of_case(found, case):
    """The results of one case without its name."""
    return {key[len(case) + 2 :]: x for key, x in found.items() if key.startswith(f"{case}: ")}


@every_model
def test_training_step(results, name):
    got, wanted = compared(results, name, "training")
    assert got["calls"]["causal_conv1d_fn"] > 0
    assert any("conv" in key and x.abs().sum() > 0 for key, x in got.items() if "grad" in key)


@every_model
@pytest.mark.parametrize("L", PROMPTS)
def test_prefill(results, name, L):
    got, _ = compared(results, name, f"prefill {L}")
    assert got["calls"]["causal_conv1d_fn"] > 0


@every_model
@pytest.mark.parametrize("L", PROMPTS)
def test_generation(results, name, L):
    """Token by token; in bfloat16 logits are those along the tokens of torch."""
    got, wanted = compared(results, name, f"generation {L}")
    assert got["calls"]["causal_conv1d_update"] >= GENERATED - 1
    assert wanted["tokens"].shape == (BATCH, L + GENERATED)
    if results[0] == "float32":
        assert torch.equal(got["tokens"], wanted["tokens"])


@pytest.mark.parametrize("name", TAKES_PACKED)
def test_packed_sequences(results, name):
    """Logits and gradients of sequences in one row are those of each alone."""
    got, _ = compared(results, name, "packed")
    assert got["calls"]["seq_idx"] == got["calls"]["causal_conv1d_fn"] > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
