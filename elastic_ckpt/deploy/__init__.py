"""Manifests for Kubernetes and scripts for Slurm, made of a configuration.

A manifest is a template with holes, which keys fill, and patches of it:

* `templates/`: the YAML of each kind of object, and of each optional part; the script.
* `clouds.yaml`: machines, networks and images, each with its source and date.
* `settings.values`: the values of all keys, which fill the holes (`template.fill`).
* `checks`: what is refused. What passed them is built without further questions.
* `patch.merged`: the one merge, of our optional parts and of `manifest_patches`.

`manifest.documents` is the way through: `checks`, then `templates/jobset.yaml` or
`pathways`, the patches of pods, and those of the user. `nodes` and `slurm` are the
other two ways.
"""
