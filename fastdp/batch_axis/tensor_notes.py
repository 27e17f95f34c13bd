"""Every attribute that fastdp sets on tensors and storages, by name, and what invalidates it.

A note with a version is valid while the tensor's `_version` is that one: what is written to the tensor since ends it.
Notes lie in the tensor's `__dict__`, so they are lost where torch makes another tensor of the same memory; what must
outlive that lies on the storage (`HELD`, `OF_MODEL`, `FOREIGN`). None of them is pickled with a meaning.
"""

# ------------------------------------------------------------------ on data
LAYOUT = "_fastdp_layout"  # which rows belong to which sample (`batch_axis.layout.Layout`)
MOMENT = "_fastdp_moment"  # of which batch the samples are (`batch_axis.generations.Generation`)
TOKEN = "_fastdp_token"  # of that moment: its end tells that nothing of the batch is left
TAGGED_AT = "_fastdp_tagged_at"  # the version at which a view was tagged
RELAID = "_fastdp_relaid"  # the version at which a memory got other rows: what its views said before is past
INPUT = "_fastdp_input"  # one of the model's arguments: its rows may be packed in ways that shapes do not tell
LOADED = "_fastdp_loaded"  # as a poisson_loader has handed it out, whether or not its batch is followed
ROWS = "_fastdp_rows"  # what the user said of its rows (`fastdp.mark_rows`)
PRESUMED = "_fastdp_presumed"  # taken for labels: in which batch, and the version then
LABELS = "_fastdp_labels"  # made of labels alone: of which, and in which order (`batch_axis.labels.Origin`)
SEEN_WITH = "_fastdp_seen_with"  # the size of the batch beside which it was first met
CUT = "_fastdp_cut"  # parts were cut out of it: the number of these parts, and the version
LONGEST = "_fastdp_longest"  # padded to the longest sample: the dimension of that size
COUNTED = "_fastdp_counted"  # one of its sizes, which the data of several samples made
GROUPS = "_fastdp_groups"  # the group of each row, the layout of these rows, the version of the memory
COLUMN = "_fastdp_column"  # the column of the samples' dimension in an index, and the version of the memory
SHARE = "_fastdp_share"  # terms of a loss, each divided by the number of samples: the version, and if that is certain
TERMS = "_fastdp_terms"  # on a total: what it was summed from, with that tensor's layout and version
SPREAD = "_fastdp_spread"  # holds the terms of a sum elsewhere (`batch_axis.equivalent_sums.Spread`)
PARTS = "_fastdp_parts"  # rows of parameters alone, joined with rows of data (`engine.parameter_slices`)
GATHERED = "_fastdp_gathered"  # a parameter's rows, one for each row of data (`grad_sample.experts`)

# ------------------------------------------------------------------ on constants
MADE = "_fastdp_made"  # how it was made within sight, and during which batch's forward or loss
ALIKE = "_fastdp_alike"  # a dimension, the version, and whether the rows along it are alike
KNOWN = "_fastdp_known"  # its numbers, of sizes alone (`batch_axis.host_values`), in the batch and version noted there
SHAPED = "_fastdp_shaped"  # the layout of the data whose shape it took
NUMBER = "_fastdp_number"  # made of one number: that number
NUMBER_OF = "_fastdp_number_of"  # of which size such a number was made
APART = "_fastdp_apart"  # shares memory with data and is none: a view of an input beside the data
WRITTEN_DOWN = "_fastdp_written_down"  # made of numbers that stand in the code: a constant, no labels
OF_READ = "_fastdp_of_read"  # made of numbers of Python, after it had read several samples
UNTRACKED = "_fastdp_constant"  # requires a gradient, but is of no sample and of no tracked parameter

# ------------------------------------------------------------------ on what is made of parameters
LINK = "_fastdp_link"  # of which parameters, and how (`grad_sample.parameter_links.Link`)
OUTSIDE = (
    "_fastdp_outside"  # a parameter: `linear_cross_entropy` gave it a gradient outside of any forward that is seen
)

# ------------------------------------------------------------------ on storages
HELD = "_fastdp_held"  # (and on each tensor with a layout) what the memory held when it was tagged
OF_MODEL = "_fastdp_of_model"  # the memory of a parameter, or of what was computed of parameters alone
OF_STATE = "_fastdp_of_state"  # by which forward without gradients it was found to hold no data
FOREIGN = "_fastdp_foreign"  # memory that torch did not make: when it was compared with the data's
