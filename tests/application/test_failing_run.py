"""A run that ends with an error finishes the save that is in flight."""

from tests import runs


class Failing:
    """A callback that fails right after a save was begun, at the step after it."""

    def after_step(self, step, report):
        del report
        if step == 5:
            raise ZeroDivisionError("of the callback")

    def after_evaluation(self, step, loss):
        del step, loss

    def get_state(self):
        return None

    def set_state(self, state):
        del state


def callbacks(config):
    """The function of `training_callbacks`."""
    del config
    return {"failing": Failing()}


def test_a_run_of_one_process_that_fails_has_its_last_due_step(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=8, checkpoint_period=4)
    ended = runs.cli("train", config, f"training_callbacks={__name__}:callbacks")
    assert ended.returncode == 1, ended.stdout
    assert "ZeroDivisionError: of the callback" in ended.stderr
    assert runs.saved_steps(tmp_path / "tiny") == [4]
    ended = runs.cli("train", config)
    assert ended.returncode == 0, ended.stderr
    assert "from step 4 to step 8" in ended.stdout
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")
