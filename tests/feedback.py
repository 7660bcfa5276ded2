"""The catalogue's feedback on countdown as a class with rewards, for runs in processes of their own."""

from gspo_jax.rewards.environments import countdown_feedback


class Feedback:
    """Replies as `countdown_feedback` does. A turn's reward is 1 for a right answer, else less the longer it is."""

    def reset(self, record: dict[str, str]) -> None:
        self.record, self.said = record, ""

    def step(self, message: dict[str, str]) -> tuple[str | None, float]:
        self.said += message["content"]
        reply = countdown_feedback("", self.said, self.record)
        self.said += reply or ""
        return reply, 1.0 if reply is None else -len(message["content"]) / 100
