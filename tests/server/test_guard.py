"""Who may come in: a server of this machine answers to this machine's names, unless a key is asked for."""

import pytest

TEXT = "/v1/completions"


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8080", "127.0.0.1:9", "127.1.2.3", "[::1]:8080", "a.localhost", "localhost."],
)
def test_this_machines_names_are_answered(client, host):
    assert client.get("/v1/models", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0:8080", "10.0.0.1"],
)
def test_a_page_of_another_name_cannot_use_a_local_server(client, host):
    for answer in (
        client.send(TEXT, b"{}", host=host),
        *(client.get(path, host=host) for path in ("/", "/metrics")),
    ):
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
        assert repr(host) in answer.error["message"]


def test_other_names_are_answered_where_the_server_is_open_or_has_a_key(open_client):
    assert open_client(host="0.0.0.0").get("/v1/models", host="box.example").status == 200
    with_key = open_client(api_key="right-key")
    assert with_key.get("/v1/models", host="box.example", authorization="Bearer right-key").status == 200
    assert with_key.get("/v1/models", host="box.example").status == 401
