"""Watch the speculation: the tree that the draft proposed in each step, and the path that the model accepted.

Usage:

    python draft_tree.py [MODEL.gguf]
"""

import sys

from dflash_ggml import Llama, Step
from dflash_ggml.files.pairs import EMBEDDED_TARGET


def draw(llm: Llama, step: Step, node: int = 0) -> None:
    """A node and all below it, indented by depth; what the model accepted has a star."""
    tree = step.tree
    text = llm.detokenize([int(tree.tokens[node])]).decode(errors="replace")
    print(f"{'*' if node in step.path else ' '} {'  ' * int(tree.depths[node])}{text!r}")
    for child in range(node + 1, tree.width):  # children stand behind their parent
        if tree.parents[child] == node:
            draw(llm, step, child)


model = sys.argv[1] if len(sys.argv) > 1 else EMBEDDED_TARGET
steps: list[Step] = []
with Llama(str(model), n_ctx=1024, verbose=False) as llm:
    llm("import numpy as np\n", max_tokens=40, temperature=0, mode="tree", budget=10, on_step=steps.append)
    drafted = [step for step in steps if step.tree is not None]  # the first token comes with the prompt
    for number, step in enumerate(drafted, 1):
        print(f"step {number}: {step.n_accepted} of {step.n_draft} drafted tokens accepted")
        draw(llm, step)

tokens = sum(len(step.tokens) for step in drafted)
print(f"{tokens} tokens in {len(drafted)} steps: {tokens / len(drafted):.2f} per pass of the model")
