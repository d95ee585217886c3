"""The file of finished outputs: whose file it may append to."""

import pytest

from ddtree.bench.outputs_file import OutputsFile
from ddtree.errors import ConfigError


@pytest.mark.parametrize("content", [b"notes without a newline", b"notes\n", b"\0\xff", b'{"prompt":"x"}\n'])
def test_a_resumed_run_leaves_a_file_of_something_else_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="a file of finished outputs, which this one is not"):
        OutputsFile(path, ("embedded",), "m").begin(is_resumed=True)
    assert path.read_bytes() == content


def test_a_torn_line_of_finished_outputs_is_cut(tmp_path):
    path = tmp_path / "outputs.jsonl"
    path.write_bytes(b'{"prompt_tokens":[1],"tokens":[2]}\n{"prompt_tok')
    OutputsFile(path, ("embedded",), "m").begin(is_resumed=True)
    assert path.read_bytes() == b'{"prompt_tokens":[1],"tokens":[2]}\n'
