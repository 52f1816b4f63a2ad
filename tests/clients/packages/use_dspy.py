"""DSPy: a signature by its JSON adapter, a plain call, several outputs, vectors."""

import dspy
from cases import BASE, MODEL, TELL, case, run

model = dspy.LM(
    f"openai/{MODEL}", api_base=BASE, api_key="none", temperature=0.0, max_tokens=200, cache=False, num_retries=9
)


class Describe(dspy.Signature):
    """Describe the person whom the text is about."""

    text: str = dspy.InputField()
    name: str = dspy.OutputField()
    mood: str = dspy.OutputField()


@case
def typed_signature():
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Describe)(text="Ann is 41 and laughs.")
    return found.name, found.mood


@case
def vectors():
    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=BASE, api_key="none", caching=False)
    return embedder(["The sea.", "A ship."])[:, :8].tolist()


run(
    plain=lambda: model(TELL, max_tokens=40),
    several=lambda: model("Name a sea.", max_tokens=16, n=2),
)
