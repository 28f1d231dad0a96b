"""Which of the defects does *this* vLLM have? Found by running its own code on a CPU, in seconds.

    target.py     what is examined: installed, wheel, folder, release        nothing of it is executed
    runner.py     one child process per target, with a time limit            nothing of it is executed
    child.py      the child: loads parts of the target, runs the probes      *executes the target's code*
    messages.py   what the child says: its lines, their allowed values
    world.py      how single modules run without importing vLLM, among stand_ins.py
    probes/       what is asked of a target, one module per part of it
    serve_*.py    a `vllm serve` command, read as the target's own parser would    nothing of it is executed
    symptom.py    from what a user sees to the probe that can tell
    reach.py      who runs the module that the probes look at
    report.py     the command: table, JSON, exit status
    matrix.py     the recorded report over all releases

A probe executes code of the target. The child process and its time limit keep a broken target from taking the caller
down; they are no sandbox: the code runs with the caller's rights, and code that wants to can lie about itself. Examine
only what you would also install.
"""
