import jax
import numpy as np
from helpers import tiny

from mars_jax.evaluation.cache import AnswerCache, digest, fingerprint


def test_values_survive_the_process(tmp_path):
    path = tmp_path / "deep" / "answers.jsonl"
    AnswerCache(path)["a"] = {"token_ids": [1, 2], "text": "\u2028é"}
    again = AnswerCache(path)
    assert "a" in again and "b" not in again and again["a"] == {"token_ids": [1, 2], "text": "\u2028é"}


def test_a_line_cut_by_a_crash_is_dropped_and_the_file_goes_on(tmp_path):
    path = tmp_path / "answers.jsonl"
    first = AnswerCache(path)
    first["a"], first["b"] = 1, 2
    data = path.read_bytes()
    for cut in range(len(data) - 8, len(data)):
        path.write_bytes(data[:cut])
        reopened = AnswerCache(path)
        assert "a" in reopened and "b" not in reopened
        reopened["c"] = 3
        again = AnswerCache(path)
        assert (again["a"], again["c"]) == (1, 3)


def test_digests_tell_jobs_apart():
    assert digest("generate", {"tau": 0.9, "mode": "window"}) == digest("generate", {"mode": "window", "tau": 0.9})
    assert digest([1, 2], [3]) != digest([1], [2, 3])


def test_a_fingerprint_is_of_the_weights():
    params = tiny.params()
    assert fingerprint(params) == fingerprint(jax.tree.map(np.asarray, params))
    trained = jax.tree.map(lambda a: a * 1.001, params)
    assert fingerprint(trained) != fingerprint(params)
    one = {**params, "final_norm": {"scale": params["final_norm"]["scale"].at[-1].add(1e-3)}}
    assert fingerprint(one) != fingerprint(params)
