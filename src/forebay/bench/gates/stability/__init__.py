"""Gate G4: days of mixed load with faults, on real engines in processes of their own.

options.py      what is asked for, and the limits
faults.py       when which fault strikes: follows from the options alone
worker.py       one process: an engine over the shared pool, its load, and what it proves
log.py          what happened, a line each: the evidence, and all that a resumed gate has to know
findings.py     the log, folded into checks
disks.py        the pool's place in each root
supervisor.py   starts and kills workers, strikes, looks at the pool, writes the log
"""
