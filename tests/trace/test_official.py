"""Result files of the official benchmarks are read; nothing else in a pickle is, and none of it runs."""

import os
import pickle
import zipfile
from types import SimpleNamespace

import pytest
import torch

from ddtree.errors import ConfigError
from ddtree.trace.baseline import write_official
from ddtree.trace.compare import compare_runs
from ddtree.trace.official import read_official
from ddtree.trace.run_file import read_run

ARGUMENTS = {"model_name_or_path": "Qwen/Qwen3-8B", "draft_name_or_path": "z-lab/Qwen3-8B-DFlash-b16",
             "temperature": 0.0, "max_new_tokens": 6, "dataset": "gsm8k", "save_path": None}  # fmt: skip


def answer(prompt, tokens, lengths, **more):
    return SimpleNamespace(
        output_ids=torch.tensor([[*prompt, *tokens]]), num_input_tokens=len(prompt),
        num_output_tokens=len(tokens), time_to_first_token=0.1, time_per_output_token=0.02,
        acceptance_lengths=lengths, **more,
    )  # fmt: skip


def responses():
    return [
        {
            "baseline": answer([1, 2], tokens, [1] * 5),
            "dflash": answer([1, 2], tokens, [3, 2]),
            "ddtree_tb64": answer([1, 2], tokens, [5], stage_times={"draft": [0.1]}, decode_rounds=1),
        }
        for tokens in ([7, 8, 9, 10, 11, 12], [3, 3, 3, 3, 3, 3])
    ]


def save(path, content):
    torch.save(content, path)
    return path


def test_every_method_becomes_an_outputs_file(tmp_path):
    content = {"responses": responses(), "block_size": 16, "args": ARGUMENTS}
    runs = read_official(save(tmp_path / "r.pt", content))
    assert [run.method for run in runs] == ["baseline", "dflash", "ddtree_tb64"]
    made = dict(write_official(runs, tmp_path / "out"))
    assert set(made.values()) == {2}
    read = {path.stem: read_run(path) for path in made}
    tree = read["ddtree_tb64"]
    assert (tree.target, tree.dtype) == ({"name": "Qwen/Qwen3-8B"}, "bfloat16")
    first = tree.answers[0]
    assert (first.output.prompt, first.output.tokens) == ((1, 2), (7, 8, 9, 10, 11, 12))
    assert (first.mode, first.node_budget, first.accept_lengths) == ("tree", 64, (5,))
    assert first.output.read_sampling().max_tokens == 6
    compared = compare_runs(read["baseline"], tree)
    assert (compared.num_equal, compared.findings) == (2, [])
    assert [side.accept_length for side in compared.acceptance] == [1.0, 5.0]


def test_a_bare_list_by_block_size_is_read(tmp_path):
    rows = [{1: answer([1], [2, 3], [1]), 16: answer([1], [2, 3], [1])}]
    assert [run.method for run in read_official(save(tmp_path / "r.pt", rows))] == ["baseline", "dflash"]


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Built:
    """Runs its own code by way of an allowed class's state."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return eval, (f"__import__('os').mkdir({str(self.path)!r})",)


@pytest.mark.parametrize(("kind", "named"), [(Touch, "mkdir"), (Built, "eval")])
@pytest.mark.parametrize("place", ["top", "response", "namespace", "args"])
def test_what_may_run_code_is_refused_by_name_and_does_not_run(tmp_path, kind, named, place):
    mark = tmp_path / "ran"
    bad, rows = kind(mark), responses()
    if place == "response":
        rows[1]["dflash"] = bad
    if place == "namespace":
        rows[1]["dflash"].acceptance_lengths = bad
    content = {"responses": rows, "args": ARGUMENTS | ({"dataset": bad} if place == "args" else {})}
    path = save(tmp_path / "r.pt", bad if place == "top" else content)
    with pytest.raises(ConfigError, match=rf"nothing of it was run: it holds .*\.{named}, which"):
        read_official(path)
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bare_pickle_is_refused_and_does_not_run(tmp_path):
    mark, path = tmp_path / "ran", tmp_path / "r.pt"
    path.write_bytes(pickle.dumps(Touch(mark)))
    with pytest.raises(ConfigError, match=r"is refused, nothing of it was run|no file of torch\.save"):
        read_official(path)
    assert not mark.exists()


def test_allowing_namespaces_does_not_outlive_the_reading(tmp_path):
    read_official(save(tmp_path / "r.pt", responses()))
    assert SimpleNamespace not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: rows[0].update(dflash=3), "'int', no namespace"),
        (lambda rows: setattr(rows[0]["dflash"], "output_ids", [1, 2]), "no output_ids"),
        (lambda rows: setattr(rows[0]["dflash"], "output_ids", torch.ones(1, 4)), "no output_ids"),
        (lambda rows: setattr(rows[0]["dflash"], "num_input_tokens", 8), "num_input_tokens=8"),
        (lambda rows: setattr(rows[0]["dflash"], "acceptance_lengths", [0]), "acceptance_lengths"),
        (lambda rows: rows.clear(), "no list of responses"),
    ],
)
def test_other_shapes_are_refused(tmp_path, change, told):
    rows = responses()
    change(rows)
    with pytest.raises(ConfigError, match=told):
        read_official(save(tmp_path / "r.pt", {"responses": rows, "args": ARGUMENTS}))


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_official(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(ConfigError, match=r"is refused, nothing of it was run|no file of torch\.save"):
        read_official(tmp_path / "text.pt")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(ConfigError, match=r"no file of torch\.save"):
        read_official(tmp_path / "zip.pt")
