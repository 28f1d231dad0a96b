"""`dcp-fix compare`: two serving endpoints (vLLM, SGLang), byte for byte, each asked twice.

Begin with compare.py; ask.py has the prompts, endpoint.py one server, saved.py its answers in a file.
Not here: starting a server, and any opinion on speed.
"""
