"""The benchmarks of the SFVI paper's experiments: their scores in closed form, and tiny runs from data to figure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_fed as nf
from benchmarks import common, mnist, prodlda, six_cities_avg


def images(seed, number):
    """Pictures of ten different strips in noise: easy digits."""
    rng = np.random.default_rng(seed)
    digit = rng.integers(0, 10, number).astype(np.int32)
    image = 0.2 * rng.uniform(size=(number, 784))
    for row, kind in zip(image, digit, strict=True):
        row[78 * kind : 78 * (kind + 1)] += 0.8
    return mnist.Images(image.astype(np.float32), digit)


def corpus(seed, num_documents=240, num_words=60, num_topics=3):
    """Documents of one topic each, whose words are a third of the vocabulary."""
    rng = np.random.default_rng(seed)
    probability = np.full((num_topics, num_words), 0.1)
    for topic, row in enumerate(probability):
        row[topic * num_words // num_topics : (topic + 1) * num_words // num_topics] = 1
    probability /= np.sum(probability, axis=1, keepdims=True)
    counts = [rng.multinomial(30, probability[i % num_topics]) for i in range(num_documents)]
    return prodlda.Corpus(np.array(counts, np.float32), np.array([f"word{i}" for i in range(num_words)]))


# --- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", [mnist, prodlda])
def test_without_data_it_says_how_to_get_them(benchmark, monkeypatch):
    monkeypatch.delenv("NUMPYRO_FED_DATA", raising=False)
    with pytest.raises(SystemExit, match=r"NUMPYRO_FED_DATA.*public: .*https?://"):
        benchmark.load()


def test_smooth_is_a_moving_average_and_steps_are_counted_from_one():
    np.testing.assert_allclose(common.smooth([4.0, 2.0, 0.0, 2.0], 2), [4.0, 3.0, 1.0, 1.0])
    assert common.steps_to([4.0, 2.0, 0.0, 2.0], 3.0, 2) == 2
    assert common.steps_to([4.0, 2.0], 1.0, 1) is None


def test_silos_share_no_image_and_are_the_same_for_a_seed():
    train = images(0, 100)
    silos = mnist.make_silos(train, 4, 20, seed=1)
    again = mnist.make_silos(train, 4, 20, seed=1)
    rows = [row.tobytes() for name in silos.names for row in silos[name]["image"]]
    assert len(set(rows)) == len(rows) == 80
    assert all(np.array_equal(silos[name]["digit"], again[name]["digit"]) for name in silos.names)
    assert len(mnist.pooled(silos).digit) == 80


def test_accuracies_by_hand():
    """Two draws that disagree: the averaged softmax follows the surer one, single draws are each right on one image."""
    w, b = np.zeros((2, 10, 784), np.float32), np.zeros((2, 10), np.float32)
    b[0, 3], b[1, 5] = 4.0, 1.0  # the first draw is sure of 3, the second leans to 5
    found = mnist.accuracy({"W": w, "b": b}, mnist.Images(np.zeros((4, 784), np.float32), np.array([3, 3, 3, 5])))
    assert found == mnist.Accuracy(75.0, 50.0)


def test_levels_are_shares_of_the_way_down():
    loss = np.concatenate([[100.0], np.linspace(100, 0, 50), np.zeros(1000)])
    assert mnist.levels(loss, shares=(0.05,), window=1) == {0.05: 5.0}


def test_umass_and_distinct_words_by_hand():
    counts = np.array([[1, 2, 0], [3, 0, 0], [1, 1, 1], [0, 0, 4]])
    top = np.array([[0, 1, 2], [2, 0, 1]])
    # documents with word 0: 3, word 1: 2, word 2: 2; with 0 and 1: 2, 0 and 2: 1, 1 and 2: 1
    first = np.mean(np.log([3 / 3, 2 / 3, 2 / 2]))  # pairs (1, 0), (2, 0), (2, 1)
    second = np.mean(np.log([2 / 2, 2 / 2, 3 / 3]))  # pairs (0, 2), (1, 2), (1, 0)
    np.testing.assert_allclose(prodlda.umass(top, counts), [first, second])
    assert prodlda.distinct(top) == 0.5
    np.testing.assert_array_equal(prodlda.top_words(np.array([[0.1, 0.7, 0.2]]), 2), [[1, 2]])


def test_documents_are_dealt_out_whole():
    data = corpus(0, num_documents=10)
    silos = prodlda.make_silos(data, 3, seed=0)
    assert [len(silos[name]["counts"]) for name in silos.names] == [4, 3, 3]
    assert prodlda.tokens(silos) == np.sum(data.counts)


def test_words_have_the_multinomials_density_but_for_its_coefficient():
    data, model = corpus(0, num_documents=6, num_words=12), prodlda.topic_model(3)
    rng = np.random.default_rng(1)
    topics, weights = rng.normal(size=(3, 12)).astype("f"), rng.normal(size=(6, 3)).astype("f")
    from numpyro.distributions import Multinomial
    from numpyro.infer.util import log_density

    joint, trace = log_density(model, (data.counts,), {}, {"topics": topics, "weights": weights})
    logits = jax.nn.softmax(weights) @ topics
    full = Multinomial(logits=logits, total_count=30).log_prob(data.counts.astype(int))
    factorial = jax.scipy.special.gammaln(data.counts + 1).sum(axis=1)
    coefficient = jax.scipy.special.gammaln(31.0) - factorial
    np.testing.assert_allclose(jnp.sum(full - coefficient), trace["words"]["fn"].log_factor.sum(), rtol=1e-4)
    assert np.isfinite(joint)


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mnist_runs_from_data_to_figure(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mnist, "load", lambda: (images(0, 400), images(1, 200)))
    mnist.main(mnist.parse(["--quick", "--out", str(tmp_path)]))
    table = (tmp_path / "mnist_table.md").read_text()
    assert all(name in table for name in ("Independent", "SFVI-Avg, one round", "SFVI-Avg (20 local steps)", "SFVI |"))
    assert (tmp_path / "mnist_warm_start.png").stat().st_size > 10_000
    assert "figure:" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("guide, methods", [("per", ["SFVI-Avg"]), ("amortised", ["SFVI", "Independent"])])
def test_prodlda_runs_from_data_to_figure(guide, methods, monkeypatch, tmp_path):
    monkeypatch.setattr(prodlda, "load", lambda: corpus(0))
    settings = ["--quick", "--guides", guide, "--methods", *methods, "--out", str(tmp_path)]
    rows = prodlda.main(prodlda.parse(settings))
    assert [name.split("(")[0] for _, name in rows] == methods
    for seeds in rows.values():
        assert -10 < seeds[0].elbo < 0 and seeds[0].topics.shape == (5, 10)
    assert (tmp_path / "prodlda_elbo.png").stat().st_size > 10_000
    assert "word" in (tmp_path / "prodlda_topics.md").read_text()


@pytest.mark.slow
def test_prodlda_finds_topics_that_are_there():
    """Of three topics with their own thirds of the vocabulary, each one's first words come from one third."""
    data = corpus(2, num_topics=3)
    silos = prodlda.make_silos(data, 2, seed=0)
    guide = nf.guides.StructuredNormal(global_cov="diagonal", local_cov="diagonal", coupling=False)
    fit = nf.SFVI(prodlda.topic_model(3), guide=guide, importance_samples=1, start_rounds=0).run(
        jax.random.key(0), silos, 1500, progress_bar=False
    )
    thirds = prodlda.top_words(prodlda.mean_topics(fit)) // 20
    assert sorted(thirds[:, 0]) == [0, 1, 2] and np.mean(thirds == thirds[:, :1]) > 0.9


@pytest.mark.slow
def test_six_cities_runs_from_data_to_figure(tmp_path):
    lines = six_cities_avg.main(six_cities_avg.parse(["--quick", "--out", str(tmp_path)]))
    assert len(lines) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"six_cities_avg.md", "six_cities_avg.png"}
