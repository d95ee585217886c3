"""The plugin touches nothing of SGLang outside of the hook contract, and the contract has nothing unused.

Read from the plugin's syntax trees. Types are not inferred: a variable is taken for what its name says, by
the two tables below, so that a new name for an old thing is a line there.
"""

import ast
from pathlib import Path

import pytest

import ddtree.sglang_plugin.contract_hooks as hooks
from ddtree.sglang_plugin.contract_ast import class_members, last_name
from ddtree.sglang_plugin.contract_hooks import TABLE
from ddtree.sglang_plugin.contract_rules import Kind

FOLDER = Path(hooks.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if not path.stem.startswith("contract"))
MODULES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
PATHS = {hook.path for hook in TABLE}

# Last parts of expressions that are objects of SGLang, by the classes whose attributes they have.
OBJECTS = {
    "Backend": ["Backend"],
    "CaptureHiddenMode": ["CaptureHiddenMode"],
    "ForwardMode": ["ForwardMode"],
    "attn_backend": ["AttentionBackend"],
    "backend_mask": ["VerifyMask"],
    "batch": ["ScheduleBatch"],
    "cuda_graph_config": ["CudaGraphConfig"],
    "decode_graphs": ["PhaseConfig"],
    "draft_input": ["DFlashDraftInputV2"],
    "draft_model_runner": ["ModelRunner"],
    "envs": ["Envs"],
    "forward_batch": ["ForwardBatch"],
    "forward_mode": ["ForwardMode"],
    "group": ["GroupCoordinator"],
    "info": ["SamplingBatchInfo"],
    "kv": ["ReqKvInfo"],
    "kv_index_translator": ["KVIndexTranslator"],
    "logits_output": ["LogitsProcessorOutput"],
    "model_config": ["ModelConfig"],
    "model_runner": ["ModelRunner"],
    "out": ["GenerationBatchResult", "LogitsProcessorOutput", "ModelRunnerOutput"],
    "params": ["SamplingParams"],
    "plan": ["KVLocPlan"],
    "pool": ["MHATokenToKVPool"],
    "req": ["Req"],
    "req_to_token_pool": ["ReqToTokenPool"],
    "runner": ["ModelRunner"],
    "sampling_info": ["SamplingBatchInfo"],
    "sampling_params": ["SamplingParams"],
    "shard": ["VocabParallelEmbeddingShardIndices"],
    "target": ["ModelConfig"],
    "target_worker": ["TpModelWorker"],
    "verify_mask": ["VerifyMask"],
    "worker": ["DFlashWorkerV2", "DDTreeWorkerV2"],
}
# Expressions that hold server arguments: fields of `ServerArgs`, or of a namespace from 0.5.20 on.
SETTINGS = {
    "args", "graph", "kernel", "observability", "server_args", "spec",
    "get_observability", "get_schedule", "get_serving", "get_spec",
}  # fmt: skip
SETTINGS_OWNERS = {
    "ServerArgs",
    "_ConfigBag",
    *(p.split(":")[1].split(".")[0] for p in PATHS if "arg_groups.fields" in p),
}

# Names of methods in the table that other objects have too.
COMMON_NAMES = {"broadcast", "forward", "get"}


def imports(tree):
    """(module, name) of every import of SGLang, wherever it stands; name is None for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sglang":
            yield from ((node.module, alias) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "sglang")


def is_known(path):
    """Whether the table has a path, or something of a module or class that it names."""
    return any(known == path or known.startswith((f"{path}:", f"{path}.")) for known in PATHS)


def import_problems(tree):
    for module, alias in imports(tree):
        path = module if alias is None else f"{module}:{alias.name}"
        if not is_known(path) and (alias is None or not is_known(f"{module}.{alias.name}")):
            yield path


def module_attribute_problems(tree):
    """`module.name` where the module is one of SGLang's that was imported as a whole."""
    whole = {
        alias.asname or alias.name: f"{module}.{alias.name}"
        for module, alias in imports(tree)
        if alias is not None and not is_known(f"{module}:{alias.name}")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
            path = f"{whole[node.value.id]}:{node.attr}"
            if not is_known(path):
                yield path


def attribute_problems(tree):
    """`object.name` for objects of SGLang, with their classes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr.startswith("__"):
            continue
        name = last_name(node.value.func if isinstance(node.value, ast.Call) else node.value)
        owners = SETTINGS_OWNERS if name in SETTINGS else OBJECTS.get(name, [])
        if owners and not has_member(owners, node.attr):
            yield f"{name}.{node.attr} ({node.lineno})"


def has_member(owners, name):
    if any(path.endswith(f":{owner}.{name}") for owner in owners for path in PATHS):
        return True
    return any(name in own_members(owner) for owner in owners)


def own_members(name):
    """Members of a class of the plugin, empty for other classes."""
    classes = [node for tree in MODULES.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    return next((set(class_members(node)) for node in classes if node.name == name), set())


def self_problems(tree):
    """`self.name` in a class that inherits from one of SGLang's, where the name is not the class's own."""
    foreign = {alias.asname or alias.name for _, alias in imports(tree) if alias is not None}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [last_name(base) for base in node.bases if last_name(base) in foreign]
        own = own_members(node.name)
        for inner in ast.walk(node) if bases else ():
            is_self = isinstance(inner, ast.Attribute) and last_name(inner.value) == "self"
            if is_self and inner.attr not in own and not has_member(bases, inner.attr):
                yield f"{node.name}.{inner.attr} ({inner.lineno})"


def flag_problems(tree):
    """`flag(launch, "name")`: a name that no release has would never be refused."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) == "flag":
            name = node.args[1]
            if isinstance(name, ast.Constant) and not has_member(SETTINGS_OWNERS, name.value):
                yield f"{name.value} ({node.lineno})"


def call_problems(tree):
    """Calls of what the table calls or overrides, with arguments that it does not have."""
    for node in ast.walk(tree):
        name = last_name(node.func) if isinstance(node, ast.Call) else ""
        is_super = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("super().")
        kind = Kind.OVERRIDDEN if is_super and name != "__init__" else Kind.CALLED
        rows = [
            hook for hook in TABLE if hook.kind is kind and hook.name == name and hook.parameters is not None
        ]
        if rows and name not in COMMON_NAMES and not any(is_call_of(node, hook, kind) for hook in rows):
            yield f"{ast.unparse(node)} ({node.lineno})"


def is_call_of(node, hook, kind):
    by_place = [name for name in hook.parameters if not name.endswith("=")]
    by_keyword = {name.removesuffix("=") for name in hook.parameters if name.endswith("=")}
    keywords = {keyword.arg for keyword in node.keywords} - {None}
    if kind is Kind.OVERRIDDEN:
        return len(node.args) <= len(by_place) and keywords <= set(by_place)
    is_spread = any(keyword.arg is None for keyword in node.keywords)
    has_all = any(isinstance(argument, ast.Starred) for argument in node.args) or len(node.args) == len(
        by_place
    )
    return has_all and (keywords <= by_keyword if is_spread else keywords == by_keyword)


CHECKS = (
    import_problems,
    module_attribute_problems,
    attribute_problems,
    self_problems,
    flag_problems,
    call_problems,
)


@pytest.mark.parametrize("name", MODULES)
def test_everything_of_sglang_that_is_used_is_in_the_table(name):
    assert [problem for check in CHECKS for problem in check(MODULES[name])] == []


@pytest.mark.parametrize(
    "source",
    [
        "from sglang.srt.speculative.spec_info import Hidden",
        "def f():\n    from sglang.srt.nowhere import ForwardBatch",
        "import sglang.srt.nowhere",
        "from sglang.srt import nowhere",
        "from sglang.srt.layers import logprob_processor\nlogprob_processor.nothing()",
        "from sglang.srt.model_executor.cuda_graph_config import Nothing",
        "Backend.NOTHING",
        "def f(decode_graphs):\n    return decode_graphs.nothing",
        "def hook(runner, out, forward_batch, num_tokens):\n    return out.nothing",
        "def f(batch):\n    return batch.nothing",
        "def f(self):\n    self.worker.model_runner.nothing = 1",
        "def f(server_args):\n    return server_args.nothing",
        "def f():\n    return get_spec().nothing",
        "from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2\n"
        "class New(DFlashWorkerV2):\n    def f(self):\n        return self.nothing",
        "def f(launch):\n    return flag(launch, 'nothing')",
        "ForwardBatch(nothing=1)",
        "eagle_prepare_for_verify(a, b, c)",
        "super().prepare_for_decode(batch, more)",
    ],
)
def test_a_use_outside_of_the_table_is_found(source):
    assert [problem for check in CHECKS for problem in check(ast.parse(source))] != []


def words():
    """Every name that the plugin's code reads, sets, defines, passes by keyword or holds as a text."""
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from node.value.replace(":", ".").split(".")
            elif isinstance(node, ast.alias):
                yield from node.name.split(".")
            else:
                fields = (getattr(node, field, None) for field in ("id", "attr", "name", "arg"))
                yield from (value for value in fields if isinstance(value, str))


def test_everything_in_the_table_is_used():
    used = set(words())
    assert (
        sorted({hook.path for hook in TABLE if hook.kind is not Kind.COVERED and hook.name not in used}) == []
    )


def test_what_is_overridden_is_defined_by_the_plugin():
    defined = {
        node.name for tree in MODULES.values() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }
    # Set on the instance, since the model runner is made before the plugin sees it.
    replaced = {"_decode_cuda_graph_runner_cls"}
    overridden = {hook.name for hook in TABLE if hook.kind is Kind.OVERRIDDEN}
    assert overridden - defined == replaced & overridden


def test_functions_in_sglang_s_lists_take_what_they_are_called_with():
    (row,) = (hook for hook in TABLE if hook.kind is Kind.CALLBACK)
    ours = [
        node
        for name, function in (("draft_sampler", "capture"), ("greedy_graph", "__call__"))
        for node in ast.walk(MODULES[name])
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert len(ours) == 2
    for node in ours:
        # The first of SGLang's arguments is the runner that calls; ours comes after our own `self`.
        names = [argument.arg for argument in node.args.args]
        assert names[:2] == ["self", "runner"]
        assert tuple(names[2:]) == row.parameters[1:]


def test_what_is_imported_is_in_the_table_once_a_version():
    for hook in TABLE:
        same = [
            h
            for h in TABLE
            if (h.path, h.kind, h.since, h.until) == (hook.path, hook.kind, hook.since, hook.until)
        ]
        assert len(same) == 1 or hook.kind is Kind.CALLED, hook.path


def test_our_algorithm_has_the_methods_that_the_table_says_it_has():
    covered = {name for hook in TABLE if hook.kind is Kind.COVERED for name in hook.parameters}
    not_asked = {"from_string", "register", "get_platform_worker_cls"}
    assert covered - not_asked <= own_members("DDTreeSpecAlgo")
