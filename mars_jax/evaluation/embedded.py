"""The questions that the package makes itself, as a task of the harness: it needs no files and no network."""

from mars_jax.data.synthetic import make_chats
from mars_jax.errors import UserError

NAME = "synthetic"
CHATS = 1000
LONGEST_ANSWER = 96  # tokens of the quickstart's tokenizer, and more than others need


def questions() -> list[dict]:
    """`{"question", "answer"}` of held-out chats with one question and no system prompt, each question once."""
    single = [
        chat for chat in make_chats("held_out", CHATS, seed=1) if [m["role"] for m in chat] == ["user", "assistant"]
    ]
    answers = {question["content"]: answer["content"] for question, answer in single}
    return [{"question": question, "answer": answer} for question, answer in answers.items()]


def task(num_fewshot: int = 0):
    """Right is the expected answer, character by character. Raises UserError if examples are asked for."""
    if num_fewshot:
        raise UserError(f"task {NAME!r} has no examples to show: --num-fewshot {num_fewshot} must be 0")
    from lm_eval.api.task import ConfigurableTask

    def dataset(**_):
        import datasets

        return {"test": datasets.Dataset.from_list(questions())}

    return ConfigurableTask(
        config={
            "task": NAME,
            "custom_dataset": dataset,
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "question",
            "doc_to_target": "answer",
            "num_fewshot": 0,
            "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": LONGEST_ANSWER},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
    )
