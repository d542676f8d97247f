"""A replica in a process of its own: runs the prompts it is given, and says what came out."""

import json
import sys

from case_helpers import ask, replica


def main() -> None:
    wanted = json.load(sys.stdin)
    answers = []
    with replica(wanted["store"]) as engine:
        for tokens in wanted["prompts"]:
            out = ask(engine, tokens)
            answers.append({"report": out.report, "logits": out.first_logits.tolist()})
    print(json.dumps({"namespace": engine.namespace.hex(), "answers": answers}))  # noqa: T201


if __name__ == "__main__":
    main()
