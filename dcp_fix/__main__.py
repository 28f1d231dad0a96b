"""`python -m dcp_fix`: the same commands as the console script `dcp-fix`."""

from dcp_fix.cli import main

main()
