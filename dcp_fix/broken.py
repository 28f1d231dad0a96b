"""The four defects as they were, each with the signature of the function that it stands in for.

Nothing here is called by the corrected code. The ladder and the notebooks swap these in, and a test checks that each
one fails where its counterpart passes.
"""

# --- combine ----------------------------------------------------------------------------------------------------------


def attend_unrouted(q, partial, manager, decode_only=False):
    """Defect 2: the gather and the combine ran under prefill context parallelism only (vLLM issue 50095).

    A rank attends with its own heads over its own keys and returns that as the answer. A group of one is not touched.
    """
    out, _ = partial(q)
    return out.float()
