"""What the server answers, request by request."""

import json
import os
import tomllib

import pytest

from fedveil.runs.evidence import verify_ledger
from fedveil.runs.run_directory import STOP_FILE

from .conftest import id_of, words


def test_pages_are_pages(client, copied):
    copied("ended")
    for path, told in (
        ("/", "Runs"),
        (f"/run?id={id_of('ended')}", "ended"),
        ("/what-if", "noise"),
    ):
        found = client.get(path)
        assert (found.status_code, found.headers["content-type"]) == (
            200,
            "text/html; charset=utf-8",
        )
        assert told in words(found.text)
        assert "connect-src &#x27;self&#x27;" in found.text
        assert "default-src &#x27;none&#x27;" in found.text


def test_a_report_is_drawn_and_nothing_is_written(client, copied):
    folder = copied("ended")
    (folder / "report.html").unlink()
    found = client.get(f"/report?id={id_of('ended')}")
    assert found.status_code == 200
    assert "none changed, removed" in words(found.text)
    assert not (folder / "report.html").exists()
    assert "are those that the run left" in verify_ledger(folder, None)


@pytest.mark.parametrize(
    "id",
    ["", "x", "..", "../..", "%2e%2e%2f", "/etc", "ended", "ended/..", "0" * 16,
     "\u202e", "a" * 9999],
)  # fmt: skip
@pytest.mark.parametrize("path", ["run", "report", "stop"])
def test_a_run_is_named_by_its_id_and_nothing_else_is_reached(client, copied, path, id):
    copied("ended")
    ask = client.post if path == "stop" else client.get
    found = ask(f"/{path}", params={"id": id})
    assert found.status_code == 404
    assert "no such run" in found.text


def test_a_run_outside_is_not_reached_by_a_link(client, made, root):
    os.symlink(made / "ended", root / "linked")
    for name in ("linked", "ended"):
        assert client.get(f"/report?id={id_of(name)}").status_code == 404


def test_paths_do_not_climb(client):
    for path in ("/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/run/../../x", "//etc/passwd"):
        assert client.get(path).status_code in (403, 404)


def test_only_a_run_that_is_going_on_is_asked_to_end(client, copied, holding):
    folder = copied("open")
    found = client.post(f"/stop?id={id_of('open')}")
    assert (found.status_code, (folder / STOP_FILE).is_file()) == (409, False)
    assert "not running" in found.text
    holding(folder)
    assert client.post(f"/stop?id={id_of('open')}").status_code == 204
    assert (folder / STOP_FILE).is_file()


def test_a_report_of_files_that_are_not_a_run_s_is_refused(client, copied):
    folder = copied("ended")
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/etc/passwd")
    found = client.get(f"/report?id={id_of('ended')}")
    assert (found.status_code, "is a link" in found.text) == (400, True)
    assert "root:" not in found.text


def test_the_answer_comes_in_two_steps(client):
    query = {"clients": 1000, "rate": 0.1, "rounds": 20, "noise": 1.5, "delta": 1e-5}
    first = client.get("/answer", params=query).json()
    assert set(first["parts"]) == {"answer-claim", "answer-numbers"}
    second = client.get("/answer", params={**query, "fine": 1}).json()
    assert set(second["parts"]) == {"answer-claim", "answer-budget", "answer-splits"}
    assert 0.3 < second["needed"] < 1.5


@pytest.mark.parametrize(
    "query",
    [{"noise": "0"}, {"noise": "nan"}, {"rounds": "1.5"}, {"rounds": "1e9"}, {"rate": "2"},
     {"delta": "x"}, {"clients": "-1"}, {"epsilon": "inf"}, {"noise": "<script>" * 1000}],
)  # fmt: skip
def test_settings_beyond_the_sliders_are_one_line(client, query):
    for path in ("/answer", "/recipe"):
        found = client.get(path, params=query)
        assert found.status_code == 400
        assert found.headers["content-type"].startswith("text/plain")
        assert found.text.startswith(next(iter(query)))
        assert len(found.text) < 200


def test_the_recipe_is_one_that_can_be_run(client, tmp_path):
    from fedveil.runs.recipe import load_recipe

    found = client.get("/recipe", params={"clients": 50, "rounds": 7, "noise": 3, "rate": 0.25})
    assert found.headers["content-disposition"] == 'attachment; filename="what-if.toml"'
    path = tmp_path / "what-if.toml"
    path.write_text(found.text)
    recipe = load_recipe(str(path))
    assert (recipe.rounds, recipe.data.clients, recipe.sample.rate) == (7, 50, 0.25)
    assert tomllib.loads(found.text)["noise"]["multiplier"] == 3
    assert json.dumps(tomllib.loads(found.text)["budget"]["epsilon"]) == "8.0"
