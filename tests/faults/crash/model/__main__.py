"""Prints what all interleavings of each script come to, and what finds each wrong variant.

python -m tests.faults.crash.model
"""

import time

from tests.faults.crash.model.check import SCRIPTS, VARIANTS, explore, ways_of

print("| script | way | states | kills | cuts | violations | CPU s |\n| --- | --- | --- | --- | --- | --- | --- |")
for name, script in SCRIPTS.items():
    for way, options in ways_of(script).items():
        begun = time.process_time()
        found = explore(script, **options)
        taken = time.process_time() - begun
        counts = f"{found.states:,} | {found.kills:,} | {found.cuts:,} | {len(found.violations)}"
        print(f"| {name} | {way} | {counts} | {taken:.1f} |", *found.violations, flush=True)
print("\n| wrong variant | script | found |\n| --- | --- | --- |")
for variant, script, options in VARIANTS:
    found = explore(SCRIPTS[script], variant, **options)
    print(f"| {variant} | {script} | {(found.violations or ['NOT FOUND'])[0]} |", flush=True)
