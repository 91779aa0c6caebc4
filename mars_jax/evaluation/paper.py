"""The numbers of the paper (arXiv 2604.07023), to be set beside ours. Scores are percentages."""

from dataclasses import dataclass

# Column of the tables → the harness's task or group, and its metric.
COLUMNS: dict[str, tuple[str, str]] = {
    "IFEval": ("ifeval", "prompt_level_strict_acc,none"),
    "BBH": ("bbh", "exact_match,get-answer"),
    "MMLU-Pro": ("mmlu_pro", "exact_match,custom-extract"),
    "GPQA": ("gpqa_main_cot_zeroshot", "exact_match,flexible-extract"),
    "GSM8K": ("gsm8k_cot", "exact_match,flexible-extract"),
    "HumanEval": ("humaneval_instruct", "pass@1,confined"),
}


@dataclass(frozen=True)
class PaperRow:
    """One line of a table. `label` names the checkpoint, `mode` how it decoded; `scores` follow `COLUMNS`."""

    size: str
    label: str
    mode: str
    scores: tuple[float, ...]
    average: float
    tokens_per_forward: float


MAIN = (
    PaperRow("0.5B", "Base", "ar", (27.8, 6.1, 2.4, 13.6, 27.4, 26.2), 17.2, 1.00),
    PaperRow("0.5B", "AR SFT", "ar", (48.4, 26.3, 11.9, 17.9, 32.0, 35.4), 28.7, 1.00),
    PaperRow("0.5B", "AR SFT (10 epochs)", "ar", (47.8, 26.3, 9.3, 14.1, 28.3, 32.3), 26.4, 1.00),
    PaperRow("0.5B", "Block Diffusion B=4", "block diffusion", (47.1, 7.5, 2.0, 17.9, 30.6, 31.7), 22.8, 1.00),
    PaperRow("0.5B", "MARS w/o AR loss B=4", "τ=1", (48.5, 27.4, 12.3, 19.0, 29.5, 33.5), 28.4, 1.00),
    PaperRow("0.5B", "MARS B=4", "τ=1", (51.3, 26.6, 12.4, 19.4, 32.8, 40.2), 30.4, 1.00),
    PaperRow("0.5B", "MARS B=4", "τ=0.95", (45.5, 26.6, 11.5, 19.9, 31.1, 39.6), 29.0, 1.46),
    PaperRow("7B", "Base", "ar", (63.4, 24.0, 10.5, 11.6, 57.3, 82.9), 41.6, 1.00),
    PaperRow("7B", "AR SFT", "ar", (67.0, 54.0, 43.9, 27.5, 68.7, 78.7), 56.6, 1.00),
    PaperRow("7B", "MARS B=4", "τ=1", (68.2, 54.6, 44.4, 26.6, 73.2, 81.7), 58.1, 1.00),
    PaperRow("7B", "MARS B=4", "τ=0.95", (63.0, 54.3, 44.2, 27.7, 71.0, 80.5), 56.8, 1.68),
)

ABLATION = (
    PaperRow("0.5B", "AR SFT", "ar", (48.4, 26.3, 11.9, 17.9, 32.0, 35.4), 28.7, 1.00),
    PaperRow("0.5B", "MARS w/o AR loss B=4", "τ=1", (48.5, 27.4, 12.3, 19.0, 29.5, 33.5), 28.4, 1.00),
    PaperRow("0.5B", "MARS w/o AR loss B=8", "τ=1", (48.5, 24.3, 11.1, 20.8, 24.9, 28.7), 26.4, 1.00),
    PaperRow("0.5B", "MARS w/o AR loss B=16", "τ=1", (42.6, 21.7, 10.6, 16.3, 21.0, 20.7), 22.2, 1.00),
    PaperRow("0.5B", "MARS B=4", "τ=1", (51.3, 26.6, 12.4, 19.4, 32.8, 40.2), 30.4, 1.00),
    PaperRow("0.5B", "MARS B=8", "τ=1", (49.6, 26.9, 12.0, 19.6, 32.8, 37.2), 29.7, 1.00),
    PaperRow("0.5B", "MARS B=16", "τ=1", (50.7, 27.0, 12.1, 17.9, 33.8, 36.6), 29.7, 1.00),
)


@dataclass(frozen=True)
class SpeedRow:
    """Wall clock of the 7B model on 256 GSM8K questions at τ = 0.95. `cache_block` is None without a block cache."""

    batch: int
    method: str
    cache_block: int | None
    tokens_per_second: float
    seconds: float
    speedup: float


SPEED = (
    SpeedRow(4, "AR, KV cache", None, 143.4, 276.2, 1.00),
    SpeedRow(4, "MARS, recompute", None, 127.1, 306.5, 0.90),
    SpeedRow(4, "MARS, block cache", 32, 241.9, 161.2, 1.71),
    SpeedRow(8, "AR, KV cache", None, 236.7, 169.1, 1.00),
    SpeedRow(8, "MARS, block cache", 32, 368.4, 105.6, 1.60),
    SpeedRow(16, "AR, KV cache", None, 434.3, 91.8, 1.00),
    SpeedRow(16, "MARS, block cache", 16, 566.0, 68.7, 1.34),
)
