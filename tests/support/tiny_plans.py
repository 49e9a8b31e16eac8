"A plan of a paper that takes seconds: networks on the world, which needs no files"

SIZES = 'scenes = 64, valid = 16, probe = 40, probe_held = 40, test = 40, shown = 4, point = 0, baselines = false'
NET = 'size = 32, visual_depth = 10, visual_width = 8, bs = 16, warmup = 2'
TINY_PLAN = f"""
title = 'A tiny paper'
citation = 'Somebody, 2020'
note = 'One row needs private photos.'

[[pretraining]]
name = 'labels'
method = 'supervised'
recipe = 'world'
data = 'world'
changes = {{steps = 4, {SIZES}, {NET}}}

[[pretraining]]
name = 'turns'
method = 'rotnet'
recipe = 'world'
data = 'world'
changes = {{steps = 4, {SIZES}, {NET}}}

[[evaluations]]
name = 'scenes'
on = 'world'

[[tables]]
id = '1'
title = 'Tasks'
columns = [{{head = 'mAP', evaluation = 'scenes', value = 'objects'}}]

[[tables.rows]]
label = 'Labels'
run = 'labels'
paper = [52.8]

[[tables.rows]]
label = 'Turns'
run = 'turns'
paper = [nan]

[[tables.rows]]
label = 'Stock'
missing = 'the photos are private'
paper = [54.9]
"""
