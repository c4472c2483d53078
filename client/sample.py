"""`python -m client.sample DIR PROMPT`: opens an export with transformers and goes on writing, byte by byte.

A program of its own, for transformers brings torch with it, which the client does without.
"""

import sys

NUM_BYTES = 400
_SEED = 7
_TEMPERATURE = 0.6


def main() -> None:
    """Prints prompt and continuation."""
    from transformers import AutoModelForCausalLM, BatchEncoding, set_seed

    directory, prompt = sys.argv[1:]
    set_seed(_SEED)
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = list(prompt.encode())
    inputs = BatchEncoding({"input_ids": [tokens], "attention_mask": [[1] * len(tokens)]}, tensor_type="pt")
    written = model.generate(  # type: ignore[misc]  # its mixins do not fit their own types
        **inputs, max_new_tokens=NUM_BYTES, do_sample=True, temperature=_TEMPERATURE, top_k=0, pad_token_id=0
    )
    sys.stdout.write(bytes(written[0].tolist()).decode("utf-8", errors="replace"))


if __name__ == "__main__":
    main()
