"""Write the measured tables into README.md and docs/, from benchmarks/results/*.json.

    python benchmarks/tables.py            rewrite the tables
    python benchmarks/tables.py --check    fail if they are not up to date

A table is between `<!-- table: NAME -->` and `<!-- end -->`. A table without a results file does
not change.

    tables_layers.py    decoder layers and small models
    tables_models.py    whole models, on one GPU and several
    tables_runs.py      training runs
    tables_kernels.py   kernels and the optimizer
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables_kernels import (
    accumulation_table,
    kernels_table,
    optimizer_errors_table,
    optimizer_muon_table,
    optimizer_speed_table,
    optimizer_sums_table,
)
from tables_layers import (
    ablation_table,
    gpt2_table,
    layer_table,
    moe_table,
    never_slower_table,
    steps_table,
    zoo_operators_table,
    zoo_table,
)
from tables_models import (
    compile_time_table,
    depths_table,
    distributed_table,
    formats_table,
    large_models_table,
    llmq_table,
    long_table,
    lora_table,
    model_table,
    pipelines_table,
)
from tables_runs import (
    convergence_table,
    lora_losses_table,
    quality_rates_table,
    quality_table,
    stability_ranks,
    stability_table,
)

HERE = Path(__file__).parent
DOCUMENTS = (
    HERE.parent / "README.md",
    *(
        HERE.parent / "docs" / f"{name}.md"
        for name in (
            *("results", "quality", "supported", "measured-memory", "measured-lora"),
            *("measured-optimizer", "measured-distributed", "measured-stability"),
        )
    ),
)
# Results files that are named differently from their tables.
RESULTS = {
    "stability_ranks": "stability",
    "zoo_operators": "zoo",
}
TABLES: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
    "layer": layer_table,
    "layer_block": layer_table,
    "moe": moe_table,
    "moe_block": moe_table,
    "model": model_table,
    "distributed": distributed_table,
    "distributed_1b": distributed_table,
    "distributed_graphs": distributed_table,
    "distributed_in_graph": distributed_table,
    "long_sequences": long_table,
    "large_models": large_models_table,
    "pipelines": pipelines_table,
    "compile_time": compile_time_table,
    "depths": depths_table,
    "convergence": convergence_table,
    "moe_convergence": convergence_table,
    "stability": stability_table,
    "simulate": layer_table,
    "stability_clamps": stability_table,
    "stability_ranks": stability_ranks,
    "formats": formats_table,
    "kernels": kernels_table,
    "kernels_block": kernels_table,
    "ablation": ablation_table,
    "gpt2": gpt2_table,
    "never_slower": never_slower_table,
    "steps": steps_table,
    "llmq": llmq_table,
    "model_8b": model_table,
    "lora": lora_table,
    "lora_experts": lora_table,
    "lora_diffusion": lora_table,
    "lora_losses": lora_losses_table,
    "lora_losses_experts": lora_losses_table,
    "accumulation": accumulation_table,
    "quality": quality_table,
    "quality_accumulation": quality_table,
    "quality_large": quality_table,
    "quality_lengths": quality_table,
    "quality_muon": quality_table,
    "quality_rates": quality_rates_table,
    "quality_mantissa": quality_rates_table,
    "zoo": zoo_table,
    "zoo_operators": zoo_operators_table,
    "optimizer_errors": optimizer_errors_table,
    "optimizer_sums": optimizer_sums_table,
    "optimizer_speed": optimizer_speed_table,
    "optimizer_muon": optimizer_muon_table,
    "optimizer_muon_h100": optimizer_muon_table,
}


def markdown(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table; the first row is the header."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def caption(data: dict[str, Any]) -> str:
    """Return the device, versions, date and commit of a result, and its note."""
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items() if k != "fp8pass")
    device = "CPU" if data["gpu"] == "none" else data["gpu"]
    commit = f", commit {data['commit']}" if "commit" in data else ""
    note = data.get("note", data.get("settings", {}).get("note"))
    return f"*{device}, {versions}, {data['date']}{commit}{f'; {note}' if note else ''}*"


def fill_tables(text: str) -> str:
    """Return `text` with every table recreated from its results file."""

    def table(match: re.Match[str]) -> str:
        name = match[1]
        path = HERE / f"results/{RESULTS.get(name, name)}.json"
        if not path.exists():
            return match[0]
        data = json.loads(path.read_text())
        body = markdown(TABLES[name](data))
        return f"<!-- table: {name} -->\n{body}\n\n{caption(data)}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    args = parser.parse_args()
    for document in DOCUMENTS:
        text = document.read_text()
        new = fill_tables(text)
        if args.check and new != text:
            sys.exit(f"{document} is outdated. Run python benchmarks/tables.py.")
        document.write_text(new)


if __name__ == "__main__":
    main()
