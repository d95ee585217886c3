"""The server against its own /openapi.json, with requests that schemathesis makes from it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    ignored_auth,
    missing_required_header,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from server_kit import InstantEngine, live_server

KEY = "the-key"
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/v1/ddtree/stats"),
]
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    response_headers_conformance, negative_data_rejection, missing_required_header, unsupported_method,
    allow_header_conformance, ignored_auth,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_engine_of_server):
    with live_server(InstantEngine(tiny_engine_of_server), KEY, node_budget=6) as live:
        yield live


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


CASES = [
    (*operation, mode)
    for operation in OPERATIONS
    for mode in GenerationMode
    # A GET without parameters has nothing that could be wrong.
    if mode is GenerationMode.POSITIVE or operation[0] == "POST" or "{" in operation[1]
]


@pytest.mark.parametrize(("method", "path", "generation_mode"), CASES)
def test_every_operation_keeps_to_its_description(api, method, path, generation_mode):
    @settings(
        max_examples=40, derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=api[path][method].as_strategy(generation_mode=generation_mode))
    def check(case):
        case.call_and_validate(checks=CHECKS, headers={"Authorization": f"Bearer {KEY}"})

    check()


def test_the_operations_are_these(api):
    found = {(operation.ok().method.upper(), operation.ok().path) for operation in api.get_all_operations()}
    assert found == set(OPERATIONS)
