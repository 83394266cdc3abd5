"""`python -m disagg.bench.transfer`: `disagg bench transfer` where only torch is installed."""

from disagg.bench.transfer.run import main

main()
