"""Texts in recipes: a table's column or a data set's, read by a model of the zoo."""

import csv

import numpy as np
import pytest

import fedveil as fv
from fedveil.base.errors import BadInput
from fedveil.runs.build import build
from fedveil.runs.opened_run import predictions_csv
from fedveil.runs.recipe import load_recipe

BASE = ["data.path=t.csv", "data.client=user", "data.target=label", "data.test=by-client",
        "data.columns.text.length=6"]  # fmt: skip
SHORT = ["rounds=2", "client.epochs=1", "engine.workers=1", "client.lr=0.5", "model.embedding=8"]
NOISY = ["noise.multiplier=2.0", "budget.epsilon=inf", "budget.delta=1e-3"]
HASHED = "data.columns.text.buckets=40"


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """t.csv in the current directory: 40 users with 6 reviews."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    with (tmp_path / "t.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["user", "text", "label"])
        for k in range(240):
            words = random.choice(["the", "film", "plot", "was", "long"], 5).tolist()
            good = bool(random.integers(2))
            words[random.integers(5)] = "good" if good else "bad"
            out.writerow([f"u{k % 40}", " ".join(words), ("no", "yes")[good]])
    return tmp_path


def recipe(*settings):
    return load_recipe("central", [*BASE, *SHORT, *NOISY, *settings])


@pytest.mark.parametrize("mode", ["vectorised", "looped"])
@pytest.mark.parametrize("name", ["lstm", "transformer"])
def test_a_model_of_texts_trains_and_reads_new_ones(reviews, name, mode):
    asked = recipe(f"model.name={name}", HASHED, f"engine.mode={mode}")
    result = fv.run(asked, out="run")
    assert 0 < result.claims[0].epsilon < 100
    opened = fv.open_run("run")
    assert opened.stored.schema.feature_columns[0].text.vocabulary.buckets == 40
    told = opened.predict({"text": ["A good film, was it?", "never seen words only"]})
    assert set(told) == {"prediction", "p(no)", "p(yes)"}
    assert set(told["prediction"]) <= {"no", "yes"}
    assert opened.evaluate("t.csv")["loss"] > 0


@pytest.mark.parametrize("name", ["lstm-lm", "transformer-lm"])
def test_a_model_of_next_words_trains_and_says_what_comes_next(reviews, name):
    settings = ["data.path=t.csv", "data.client=user", "data.target=text", "data.test=by-client",
                *SHORT,
                "data.columns.text.length=6", "data.columns.text.words=words.txt",
                f"model.name={name}", "sample.size=10", "client.lr=2.0", "rounds=4"]  # fmt: skip
    (reviews / "words.txt").write_text("the\nfilm\nplot\nwas\nlong\ngood\nbad\n")
    result = fv.run(load_recipe("fedavg", settings), out="run")
    assert result.history[-1]["loss"] < np.log(7) + 0.1 < result.history[0]["loss"]
    opened = fv.open_run("run")
    told = opened.predict({"text": ["the plot was", "good", "never seen words"]})
    assert set(told) == {"prediction"}
    assert set(told["prediction"]) <= {"the", "film", "plot", "was", "long", "good", "bad"}
    assert opened.evaluate("t.csv")["loss"] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.target=text", "model.name=lstm"], "'lstm' predicts one label or one number"),
        (["data.target=label", "model.name=lstm-lm"], "'lstm-lm' predicts the next word in each"),
    ],
)
def test_models_that_predict_something_else_are_refused(reviews, settings, message):
    with pytest.raises(BadInput, match=message):
        build(recipe(HASHED, *settings))


def test_modes_agree(reviews):
    losses = []
    for mode in ("vectorised", "looped"):
        settings = [*BASE, *SHORT, HASHED, "model.name=transformer", f"engine.mode={mode}",
                    "sample.size=10"]  # fmt: skip
        *_, last = fv.train(build(load_recipe("fedavg", settings)))
        losses.append(last.metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_words_of_a_vocabulary_are_kept_with_the_model(reviews):
    fv.run(recipe("model.name=lstm", "data.columns.text.min_texts=3"), out="run")
    schema = fv.open_run("run").stored.schema
    words = schema.feature_columns[0].text.vocabulary
    assert {"good", "bad", "film"} <= set(words.words)
    assert words.decode(schema.encode({"text": ["GOOD film"]})) == ["good film"]
    told = fv.open_run("run").claims[0].assumptions
    assert any(said.startswith("words of 'text', labels of 'label' were fitted") for said in told)


def test_words_of_clients_are_refused_with_secure_noise(reviews):
    asked = recipe("model.name=lstm", "data.statistics=clients", "noise.source=secure")
    with pytest.raises(BadInput, match="'secure' and words of 'text', labels of 'label' were"):
        build(asked)


def test_clients_of_a_table_may_be_grouped(reviews):
    data = recipe(HASHED, "data.partition=grouped", "data.clients=4").load_data()
    assert data.clients == 4
    assert any(said.startswith("clients are 4 groups of owners") for said in data.assumptions)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.name=mlp", "model.embedding=8"], "model.embedding has no effect on 'mlp'"),
        (["model.name=lstm", "model.heads=2"], "model.heads has no effect on 'lstm'"),
        (["model.name=transformer", "model.hidden=[3]"], "model.hidden has no effect on 'trans"),
        (["model.name=transformer", "model.heads=3"], "model.embedding is 8 and model.heads 3"),
        (["model.name=lstm", "model.words=50"], "model.words is 50 and the data's vocabulary has"),
        (["model.name=lstm", "model.hidden=[9000]"], "ask for .* parameters: at most"),
        (["model.name=lstm", "data.columns.text.length=0"], "columns.text.length is 0"),
        (["model.name=softmax", "model.embedding=none"], "whole numbers .* begin with an embed"),
    ],
)
def test_what_does_not_go_together_is_refused(reviews, settings, message):
    with pytest.raises(BadInput, match=message):
        build(recipe(HASHED, *settings))


def rows_of_words(high=9):
    x = np.random.default_rng(0).integers(0, high, (12, 4))
    return fv.FederatedData.from_clients(
        [(f"c{k}", x[2 * k : 2 * k + 2], [0, 1]) for k in range(5)],
        test=(x[10:], [0, 1]), classes=2,
    )  # fmt: skip


def test_arrays_of_words_need_their_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows_of_words().save("rows")
    saved = ["data.name=saved", "data.path=rows", "data.clients=none", "data.partition=none"]

    def made(*settings):
        return build(load_recipe("fedavg", [*saved, "sample.size=2", "model.name=lstm", *settings]))

    task = made("model.words=9").task
    assert task.named(task.parameters)["words.weight"].shape == (9, 32)
    with pytest.raises(BadInput, match=r"no vocabulary: declare .* or give model\.words"):
        made()
    with pytest.raises(BadInput, match=r"model.words is 8 and .*records have numbers from 0 to 8"):
        made("model.words=8")


def test_records_that_are_no_words_have_no_vocabulary():
    with pytest.raises(BadInput, match="'lstm' reads texts and the records have no vocabulary"):
        build(load_recipe("central", ["model.name=lstm"]))


def test_raw_texts_are_predicted_from_files(reviews):
    fv.run(recipe("model.name=lstm", HASHED), out="run")
    (reviews / "new.csv").write_text("text\nA good film\nA bad plot\n")
    (reviews / "new.txt").write_text("A good film\n\nA bad plot\n")
    opened = fv.open_run("run")
    found = [predictions_csv(opened, reviews / name) for name in ("new.csv", "new.txt")]
    assert found[0] == found[1]
    assert found[0].splitlines()[0] == "prediction,p(no),p(yes)"
    assert len(found[0].splitlines()) == 3
    with pytest.raises(BadInput, match=r"new.pdf is no input: name a .csv, .parquet, .txt or .npy"):
        predictions_csv(opened, reviews / "new.pdf")
