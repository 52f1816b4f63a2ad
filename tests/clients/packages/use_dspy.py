"""DSPy: a signature by its JSON adapter, a plain call, several outputs, vectors."""

import dspy
from cases import BASE, MODEL, case, run

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
def plain():
    return model("Tell me a story of the sea.", max_tokens=40)


@case
def several():
    return model("Name a sea.", max_tokens=16, n=2)


@case
def vectors():
    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=BASE, api_key="none", caching=False)
    return embedder(["The sea.", "A ship."])[:, :8].tolist()


run()
