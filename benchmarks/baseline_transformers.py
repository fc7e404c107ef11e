"""transformers as a converter: from_pretrained the old layout, save_pretrained the new one.

baseline_transformers.py SOURCE TARGET [--max-shard-size 5GB]
"""

from __future__ import annotations

import argparse
import os

os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--max-shard-size", default="5GB")
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype="auto")
    model.save_pretrained(
        args.target, save_original_format=False, max_shard_size=args.max_shard_size
    )


if __name__ == "__main__":
    main()
