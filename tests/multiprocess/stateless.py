"""A callback without a state, for those of tests that act after a step."""


class Stateless:
    """The part of a callback beside `after_step`."""

    def after_evaluation(self, step, loss):
        del step, loss

    def get_state(self):
        return {}

    def set_state(self, state):
        assert state == {}
