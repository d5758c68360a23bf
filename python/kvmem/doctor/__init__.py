"""Says whether CUDA can be used here, and what of this machine matters to offloading.

`kvmem doctor` on the command line, or:

    from kvmem.doctor.checks import check
    from kvmem.doctor.facts import probe

    facts = probe()
    findings = check(facts)

Needs nothing but kvmem; the table needs rich, the command typer.
"""
