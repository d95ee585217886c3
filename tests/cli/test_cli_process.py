"""The command line on a real, tiny model, and what only a process of its own shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny_models import tiny_llama, write_tiny_drafter

SOURCE = Path(__file__).parents[2] / "src"
SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"


def write_byte_tokenizer(path):
    """A tokenizer of one token a byte."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folders (target, drafter) of a tiny pair that generates bytes."""
    folder = tmp_path_factory.mktemp("pair")
    model = tiny_llama(vocab_size=260)
    model.save_pretrained(folder / "target")
    write_byte_tokenizer(folder / "target")
    write_tiny_drafter(folder / "drafter", model, max_position_embeddings=4096)
    return folder / "target", folder / "drafter"


@pytest.fixture
def pair_flags(checkpoint):
    target, drafter = checkpoint
    return [
        "--model", str(target), "--drafter", str(drafter), "--device", "cpu", "--dtype", "float32",
        "--threads", "1", "--max-context", "512", "--budget", "6",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sampling", [[], ["--temperature", "1", "--seed", "3", "--top-p", "0.9", "--frequency-penalty", "0.5"]]
)
def test_all_modes_give_the_text_of_plain_decoding(command, pair_flags, sampling):
    documents = []
    for mode in (["ar"], ["chain"], ["tree"], ["tree", "--budget", "auto"]):
        code, out, _ = command(
            "generate", "Hello 你好", "--json", "--max-tokens", "24", *sampling, *pair_flags, "--mode", *mode
        )
        assert code == 0
        documents.append(json.loads(out))
    assert len({tuple(document["tokens"]) for document in documents}) == 1
    assert documents[2]["stats"]["accept_histogram"]


def test_demo_on_a_real_model(command, pair_flags):
    code, out, _ = command("demo", "--max-tokens", "12", *pair_flags)
    assert code == 0
    assert "3 of 3 texts identical" in out
    assert "6 nodes verified in one pass" in out


def test_a_context_shorter_than_what_is_measured_at_start_works(command, pair_flags):
    code, _, err = command("generate", "Hi", *pair_flags, "--budget", "auto", "--max-context", "16")
    assert (code, "Error" in err) == (0, False)
    assert "13 tokens" in err


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of the target with one file changed by the test."""
    for file in checkpoint[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda content: content[: len(content) // 2]),
        ("model.safetensors", lambda content: b""),
        ("model.safetensors", lambda content: b"not safetensors"),
        ("model.safetensors", None),
        ("config.json", lambda content: content[:20]),
        ("config.json", lambda content: b"{}"),
        ("config.json", lambda content: content.replace(b'"hidden_size": 48', b'"hidden_size": 96')),
        ("config.json", None),
        ("tokenizer.json", lambda content: content[:20]),
        ("tokenizer.json", None),
        ("generation_config.json", lambda content: content[:2]),
    ],
    ids=[
        "half_weights", "no_bytes", "other_weights", "no_weights", "half_config", "empty_config",
        "other_config", "no_config", "half_tokenizer", "no_tokenizer", "half_generation_config",
    ],
)  # fmt: skip
def test_a_broken_checkpoint_is_refused(refused, pair_flags, broken, name, change):
    file = broken / name
    content = file.read_bytes()
    file.unlink()
    if change is not None:
        assert change(content) != content
        file.write_bytes(change(content))
    refused("generate", "Hi", *pair_flags, "--model", str(broken))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", "no/such/folder"], "no/such/folder"),
        (["--model", "/etc/hostname"], "/etc/hostname"),
        (["--drafter", "/no/such/drafter"], "/no/such/drafter"),
        (["--drafter", "auto"], "drafter"),
        (["--drafter", "none"], "drafter"),
        (["--dtype", "float16"], "float16"),
        (["--device", "cuda:77"], "cuda:77"),
        (["--max-context", "16"], "16"),
        (["--logit-bias", "260=1"], "260"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_engine_refuses_is_one_line(refused, pair_flags, flags, told):
    assert told in refused("generate", "A prompt of more than sixteen bytes", *pair_flags, *flags)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows the refusal on a machine without CUDA")
def test_cuda_without_a_gpu_is_refused(refused, pair_flags):
    assert "cuda" in refused("generate", "Hi", *pair_flags, "--device", "cuda")


def python(code, *arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment, stderr=subprocess.PIPE, timeout=120, **({"stdout": subprocess.PIPE} | options),
    )  # fmt: skip


def test_help_loads_neither_torch_nor_transformers_nor_sglang():
    code = """
import sys
from ddtree.cli.main import run
for arguments in ([], ["--version"], ["generate", "--help"], ["demo", "--help"], ["generate", ""]):
    run(arguments)
print("loaded:", {"torch", "transformers", "sglang", "huggingface_hub", "numpy"} & set(sys.modules))
"""
    assert python(code).stdout.decode().endswith("loaded: set()\n")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_names_its_install_command(package, pair_flags):
    code = f"import sys; sys.modules[{package!r}] = None\nfrom ddtree.cli.main import main; main()"
    result = python(code, "generate", "Hi", *pair_flags)
    assert result.returncode == 2
    assert result.stderr.decode() == (
        f"Error: {package} is not installed; install it with: pip install 'sglang-ddtree[engine]'\n"
    )


FAKE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import FakeEngine
from ddtree.cli import loading
from ddtree.cli.main import main
loading.load_engine = lambda config: FakeEngine()
main()
"""


@pytest.mark.parametrize("arguments", [["generate", "Hi"], ["generate", "Hi", "--json"], ["demo"], ["-h"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = python(FAKE, *arguments, *(["--quiet"] if "-h" not in arguments else []), stdout=write_end)
    os.close(write_end)
    assert result.stderr == b""
    assert result.returncode == 141 or arguments == ["-h"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["generate", "Hi", "-q"], ["generate", "Hi", "-q", "--json"]])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        result = python(FAKE, *arguments, stdout=full)
    assert result.returncode == 2
    assert result.stderr.startswith(b"Error: cannot write to standard output: No space left")
    assert result.stderr.count(b"\n") == 1
