"""Hit rates of eviction and admission policies over a trace and the seeded workloads.

`options` what can be asked for; `replay` one workload through one policy, as the engine drives it; `bound` what no
policy can exceed; `run` all of them; `record` the result; `report` and `picture` how it is shown.
"""
