"""Compares every figure of the papers with the planner's: ``make paper-table``.

One process, so that tables share traces.
"""

from benchmarks import (
    paper_baselines,
    paper_blog,
    paper_htms,
    paper_regions,
    paper_table,
    paper_table_v1,
    paper_zero_infinity,
    paper_zero_infinity_plans,
)

PROGRAMS = (
    paper_table,
    paper_regions,
    paper_baselines,
    paper_table_v1,
    paper_zero_infinity,
    paper_zero_infinity_plans,
    paper_htms,
    paper_blog,
)


if __name__ == "__main__":
    for program in PROGRAMS:
        program.main([])
        print()
