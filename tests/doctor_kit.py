"""Installations of SGLang on disk that hold no SGLang, and machines that are not there."""

import base64
import hashlib
import importlib.machinery
import json
from pathlib import Path

from ddtree.doctor.copies import SearchPath
from ddtree.doctor.environment import Environment, Gpu
from ddtree.doctor.examine import Surroundings

GIB = 1 << 30
ENTRY_POINTS = "[sglang.srt.plugins]\nddtree = ddtree.sglang_plugin.plugin:register\n"
H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB)
RTX_PRO_6000 = Gpu("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 95 * GIB)
PATCHED = ("sglang/srt/models/kimi_k25.py", "sglang/srt/server_args.py",
           "sglang/srt/speculative/eagle_worker_v2.py")  # fmt: skip


def machine(*gpus, **fields):
    """A machine with these GPUs, as a probe would describe it."""
    known = {"python": "3.12.3", "executable": "/usr/bin/python3", "torch": "2.11.0", "cuda": "12.8",
             "driver": "580.95", "gpus": gpus}  # fmt: skip
    return Environment(**{**known, **fields})


def search(*entries, cwd=None, finders=(importlib.machinery.PathFinder,)):
    """A path of these folders."""
    path = [str(entry) for entry in ([cwd] if cwd else []) + list(entries)]
    return SearchPath(tuple(path), finders, str(cwd) if cwd else None)


def around(*entries, cwd, gpus=(H200,), environ=None, fetch=None, is_cwd_first=False, **fields):
    """What the doctor looks at: a path, and a machine with these GPUs."""
    path = search(*entries, cwd=cwd if is_cwd_first else None)
    return Surroundings(lambda: machine(*gpus, **fields), path, environ or {}, cwd, fetch)


def write(base, files):
    """Write texts or bytes below a folder."""
    for name, content in files.items():
        path = Path(base, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))


def package_files(version, *, worker="v2", more=None):
    """Files of a package that looks like SGLang from outside."""
    files = {
        "sglang/__init__.py": "raise RuntimeError('imported')\n",
        "sglang/srt/__init__.py": "",
        "sglang/srt/speculative/__init__.py": "",
        **({} if version is None else {"sglang/_version.py": f"__version__ = version = '{version}'\n"}),
    }
    names = {"v2": ["dflash_worker_v2", "dflash_worker"], "v1": ["dflash_worker"], None: []}[worker]
    files |= {f"sglang/srt/speculative/{name}.py": "class Worker: ...\n" for name in names}
    return {**files, **dict.fromkeys(more or (), "VALUE = 1\n")}


def write_dist(base, version, rows=(), name="sglang", **files):
    """A distribution's own folder; `rows` are of its RECORD, and further files are given by name."""
    folder = Path(base, f"{name}-{version}.dist-info")
    files = {"METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", **files}
    if rows:
        files["RECORD"] = "".join(f"{row}\n" for row in rows)
    write(folder, files)
    return folder


def install_wheel(base, version="0.5.23", **options):
    """Put a package and its distribution into a folder as pip does, hashes included."""
    files = package_files(version, **options)
    write(base, files)
    rows = [f"{name},sha256={digest(text.encode())},{len(text)}" for name, text in files.items()]
    return write_dist(base, version, [*rows, "sglang/__pycache__/__init__.cpython-312.pyc,,"])


def digest(data):
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def install_editable(base, source, version="0.5.23"):
    """The distribution of an editable install of a source folder."""
    url = json.dumps({"url": Path(source).as_uri(), "dir_info": {"editable": True}})
    return write_dist(base, version, [f"sglang-{version}.dist-info/METADATA,,"], **{"direct_url.json": url})


def install_plugin(base):
    """The distribution of this package, by whose entry point SGLang finds the plugin."""
    dist = Path(base, "sglang_ddtree-0.1.0.dist-info")
    metadata = "Metadata-Version: 2.1\nName: sglang-ddtree\nVersion: 0.1.0\n"
    write(dist, {"METADATA": metadata, "entry_points.txt": ENTRY_POINTS})


def users_layout(home):
    """A source tree without DFlash before a patched, older site-packages; returns both folders.

    The tree is on PYTHONPATH, site-packages holds SGLang 0.5.13 with DFLASH's first worker.
    """
    source, site = home / "src/sglang/python", home / "venv/lib/python3.12/site-packages"
    write(source, package_files(None, worker=None))
    write(source, {"pyproject.toml": "[project]\nname = 'sglang'\n"})
    install_wheel(site, "0.5.13", worker="v1", more=PATCHED)
    install_plugin(site)
    write(site, {"flashinfer/__init__.py": ""})
    write(site, dict.fromkeys(PATCHED, "VALUE = 2  # patched\n"))
    write(site, {f"{name}.bak": "VALUE = 1\n" for name in PATCHED[1:]})
    return source, site


class EditableFinder:
    """An import hook as editable installs put one behind Python's own."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        folder = self.folder / name
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def by_id(findings, name):
    """The findings of that id."""
    return [finding for finding in findings if finding.id == name]


def ids(section, level=None):
    """Ids of a section's findings, of one level where it is given."""
    return [f.id for f in section.findings if level in (None, f.level)]


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36,
    "hidden_size": 4096, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B_DFLASH = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 5, "hidden_size": 4096,
    "intermediate_size": 12288, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "block_size": 16,
    "num_target_layers": 36, "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 36,
    "hidden_size": 2880, "vocab_size": 201088, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 128,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0}, "rope_theta": 150000,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": 61,
        "hidden_size": 7168, "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 262144,
        "dtype": "bfloat16", "quantization_config": {"quant_method": "compressed-tensors"},
    },
}  # fmt: skip
QWEN36_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120, "vocab_size": 248320,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 262144, "dtype": "bfloat16",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_num_value_heads": 48, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
}  # fmt: skip


def write_model(folder, config, weights=None, tensors=None, tokenizer=True):
    """A model's folder with a config; weights are an index of that many bytes, or a file of that header."""
    files = {"config.json": json.dumps(config)}
    if weights:
        files["model.safetensors.index.json"] = json.dumps({"metadata": {"total_size": weights}})
    if tensors is not None:
        header = json.dumps(tensors).encode()
        files["model.safetensors"] = len(header).to_bytes(8, "little") + header
    if tokenizer:
        files["tokenizer.json"] = "{}"
    write(folder, files)
    return folder
