"""What is left behind when a run stops for non-finite numbers."""

import json

from ullim.learner.ranks import RankPlace


def test_the_offending_sample_is_written(worker, models):
    worker.run("bad_steps", models, RankPlace())

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (models / "bad.jsonl").read_text().splitlines()]
    (line,) = lines  # the one with the broken advantage, not its neighbours in the micro-batch
    batch = worker.make_batch(2)
    assert line["sequence"] == 4
    assert line["version"] == 2
    assert line["advantage"] == "nan"
    assert line["token_ids"] == batch.sequences[4].token_ids.tolist()
    assert line["prompt_ids"] == batch.sequences[4].prompt_ids.tolist()
    assert len(line["learner_logprobs"]) == len(line["token_ids"])
    assert all(value < 0 for value in line["learner_logprobs"])
