"""Compares every figure of the papers with the planner's: ``make paper-table``.

One process, so that tables share traces.
"""

from benchmarks import paper_baselines, paper_blog, paper_htms, paper_table, paper_table_v1, paper_zero_infinity

if __name__ == "__main__":
    for program in (paper_table, paper_baselines, paper_table_v1, paper_zero_infinity, paper_htms, paper_blog):
        program.main([])
        print()
