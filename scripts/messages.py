"""Writes the list of what goes wrong at the end of docs/errors.md: `python scripts/messages.py`.

The list has the title of each topic. Topics sort the golden files of the tests, which are the texts of
all errors. A golden file that no topic names comes under "Others" of its kind, which the list leaves out.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
GOLDEN, PAGE = ROOT / "tests" / "golden", ROOT / "docs" / "errors.md"
START = "<!-- by scripts/messages.py, from here on -->\n"


class Topic(NamedTuple):
    """Messages of one kind that have the same cause.

    Attributes:
        title: what went wrong.
        says: what to do about it, in a sentence or two.
        shown: the golden files that show it best, without their ending.
        folded: patterns of the names of the others.
    """

    title: str
    says: str
    shown: tuple[str, ...]
    folded: tuple[str, ...] = ()


TOPICS: dict[str, tuple[Topic, ...]] = {
    "CarryError": (
        Topic(
            "A dtype differs",
            "In the step, cast the leaf back to its dtype. Or start from the dtype that the step computes in.",
            ("carry_dtype", "x_dtype"),
            ("*_weak_type", "*computes_in_half*", "carry_shape_and_dtype", "pipeline_x_dtype"),
        ),
        Topic(
            "A shape differs",
            "A carry cannot grow. Allocate the final size in `init` and write into it, or return the new part as `y`.",
            ("carry_grows", "carry_shape"),
            ("compact_*", "pipeline_x_shape"),
        ),
        Topic(
            "Carry and output are swapped",
            "Return the next carry first.",
            ("pair_swapped",),
            ("*swapped*",),
        ),
        Topic(
            "The structure differs",
            "Return every part of the carry, in the same containers.",
            ("carry_keys", "carry_none_returned"),
            (
                *("carry_list_*", "carry_namedtuple_*", "carry_none_*"),
                *(
                    "pipeline_x_pair",
                    "carry_static_for_array",
                    "carry_without_*",
                    "x_structure",
                    "x_classes",
                    "pair_none_*",
                ),
                "state_of_*",
            ),
        ),
        Topic(
            "Something that is not an array changed",
            "Functions, strings and metadata must be the same in all steps.",
            ("carry_static_changed",),
            ("*_static", "*_metadata*"),
        ),
        Topic(
            "A random key changed its kind",
            "Keep the same kind of key throughout the loop.",
            ("carry_key_impl",),
            ("*_key_*",),
        ),
        Topic(
            "Devices differ",
            "Start from a value with the sharding that the step returns.",
            ("carry_begins_to_vary", "carry_sharding"),
            ("*_vary", "*_sharding"),
        ),
        Topic(
            "Several leaves differ, or a loop within a loop",
            "The message lists all leaves. It names the body that is wrong, which may be the inner one.",
            ("carry_several_leaves", "named_inner"),
            ("lift_*", "while_*"),
        ),
    ),
    "BodyError": (
        Topic(
            "The body returns something else",
            "The body of `scan`, `mask_scan` and `while_scan` must return a pair `(carry, y)`. The body of the "
            "other loops must return only the carry.",
            ("pair_none", "pair_carry_only", "pair_in_fold"),
            ("pair_*", "while_carry_alone", "body_of_three", "y_static*"),
        ),
        Topic(
            "A function over chunks returns something else",
            'It returns an output for each entry of its chunk. With `reduce="sum"`, it returns sums over them.',
            ("chunk_map_without_entries", "chunk_map_other_sum"),
            ("chunk_map_without*", "chunk_map_other*", "chunk_map_sum*"),
        ),
        Topic(
            "A stage of a pipeline",
            "It must not wait for other stages, and is given what all stages share as `args`.",
            ("pipeline_over_its_axis", "pipeline_closes_over"),
            ("pipeline_masked",),
        ),
        Topic(
            "The block of a layer",
            "A block of `scan_layers` must return a pair `(x, y)`, and a block of `fold_layers` only x. With "
            "`state`, the new state comes after x.",
            ("block_returns_x_alone", "block_of_fold_layers_returns_pair", "state_is_not_returned"),
            ("block_return*", "block_of_*", "block_changes_*", "state_*"),
        ),
        Topic(
            "The body takes other arguments",
            "Pass the option that the body needs, or add the parameter that the option passes.",
            ("key_needed", "key_not_taken", "valid_needed"),
            ("key_*", "block_that_*", "block_with*", "*_without_key", "while_key_*", "while_valid_*", "init_layers_*"),
        ),
        Topic(
            "It cannot be called",
            "Pass the body first. It must be a function.",
            ("not_callable",),
            ("*not_callable*", "named_*", "lift_of_no_function"),
        ),
        Topic(
            "The condition of while_scan",
            "The condition receives the carry. It returns one bool, or one for each row.",
            ("while_condition_of_nothing", "while_condition_of_two"),
            ("while_condition_*",),
        ),
        Topic(
            "A body that `compact` cannot run",
            "The body must work for any number of rows.",
            ("compact_body_counts_rows", "while_compact_over_closed_over_rates"),
            ("*compact*",),
        ),
        Topic(
            "A module of another library",
            "A body must not change a module that was made outside of it. Use the loops of the integrations.",
            ("dropout_closed_over", "linen_module_in_a_body"),
            ("dropout_*", "linen_*", "model_*"),
        ),
        Topic(
            "The function of `lift`",
            "The function must return `((carry, y), updates)`.",
            ("lift_returns_no_updates",),
            ("lift_*",),
        ),
    ),
    "SignatureError": (
        Topic(
            "A value does not match its annotation",
            "Change the annotation or the value. Within a step, each axis name has one size.",
            ("signature_carry", "signature_y"),
            ("*",),
        ),
    ),
    "ArgumentError": (
        Topic(
            "The source of a stream",
            "All parts have `chunk` steps, except for the last one, and the same types.",
            ("stream_ends_early", "stream_part_too_short", "stream_part_of_another_dtype"),
            ("stream_*", "checkpoints_*"),
        ),
        Topic(
            "A pipeline",
            "Call it in a `jax.shard_map` with a manual axis for the stages, of which all have equally many layers.",
            ("pipeline_outside", "pipeline_axis_not_manual", "pipeline_micro_batches_left_over"),
            ("pipeline_*",),
        ),
        Topic(
            "How many steps",
            "`length` or xs must determine the number of steps. If both are given, they must agree.",
            ("length_missing", "length_conflict", "xs_sizes_differ"),
            ("length_[!m]*", "length_missing*", "xs_*", "fori_*", "unroll_*", "offset_*", "forgotten_*"),
        ),
        Topic(
            "Lengths, masks and rows",
            "Pass `lengths` or `mask`. Each leaf must have the batch shape in front, or an entry in "
            "`row_axes` that says where it is.",
            ("mask_neither", "lengths_out_of_range", "batch_not_in_x"),
            (
                *("mask_*", "lengths_*", "length_mask_*", "batch_*", "time_*", "resets_*"),
                "carry_axes_*",
            ),
        ),
        Topic(
            "The value of outputs on padding",
            "`fill` must fit the dtype of the output.",
            ("fill_does_not_fit",),
            ("fill_*",),
        ),
        Topic(
            "The value that a reset restores",
            "`reset_to` must fit the carry.",
            ("reset_to_of_other_types",),
            ("reset_to_*",),
        ),
        Topic(
            "chunk and compact",
            "`compact` makes demands on the body and on the rows. The message says which.",
            ("compact_single_row", "compact_with_key"),
            ("chunk_*", "compact_*"),
        ),
        Topic(
            "Padding and packing",
            "`pad` and `pack` take a list of sequences. Each is a tree of arrays whose first axis is the steps.",
            ("pad_types_differ", "pad_too_long", "packed_with_time_axis", "padded_in_fold"),
            ("pad_*", "pack_*", "packed_*", "padded_*", "unpad_*", "unpack_*", "repad_*", "last_*", "sequences_in_*"),
        ),
        Topic(
            "Axes",
            "Every axis must exist. A tree of axes must be a prefix of the tree that it describes.",
            ("in_axes_out_of_range", "in_axes_no_prefix"),
            ("in_axes_*", "out_axes_*", "*_in_axes_*", "*_out_axes_not_there"),
        ),
        Topic(
            "An option that the verb does not take",
            "The message names the verbs that take it.",
            ("option_refused_by_fold",),
            ("option_*", "*_in_fold", "*_in_fold_layers", "layers_option_*"),
        ),
        Topic(
            "Recomputing: remat",
            'Pass `"step"`, `"nested"`, `"auto"`, a `Remat` or None. A budget must be large enough for at '
            "least one plan.",
            ("remat_unknown", "remat_budget_too_small"),
            ("remat_*", "plan_*", "*_remat_*", "*_with_nested_*"),
        ),
        Topic(
            "What is kept: save and truncate",
            '`save` keeps all outputs ("all"), the last one ("last"), every k-th one (an int), or none (None).',
            ("save_unknown",),
            ("save_*", "truncate_*", "*_save_*", "state_beside_a_save_*"),
        ),
        Topic(
            "Loops that stop",
            "`while_scan` needs xs or a `max_length`. If the condition has rows, the carry must have them too.",
            ("while_without_max_length",),
            ("while_*",),
        ),
        Topic(
            "Layers",
            "Pass values that all layers share as `args`.",
            ("layers_args_array",),
            ("layers_*", "init_layers_*", "pattern_*"),
        ),
        Topic(
            "check_finite and progress",
            "The message names the loops that do not support them, and an alternative.",
            ("check_finite_within_shard_map",),
            ("check_finite_*", "progress_*"),
        ),
        Topic(
            "describe",
            "Pass a verb of treescan, and then its arguments.",
            ("describe_of_no_verb",),
            ("describe_*", "measure_*"),
        ),
        Topic("lift", "Each collection and each stream needs a role.", ("lift_collection_without_role",), ("lift_*",)),
    ),
    "ArgumentTypeError": (
        Topic(
            "An option that the verb does not have",
            "The message suggests the option with the most similar name.",
            ("option_misspelt", "option_of_mask_scan", "pad_value", "lengths_by_position"),
            (
                "option_*",
                "stack_axis",
                "*_by_position",
                "*_unknown_option",
                "truncate_in_layers",
                "*_of_layers",
                "check_finite_*",
            ),
        ),
        Topic(
            "A key",
            "Pass a key made by `jax.random.key`, not a seed.",
            ("key_int",),
            ("key_*", "*_of_a_seed", "*_key_seed", "lift_seed_*", "*_keys_*", "init_layers_*"),
        ),
        Topic(
            "An argument has the wrong type",
            "The message says which types the option accepts.",
            ("length_float", "length_of_rows", "mask_not_bool", "in_axes_float"),
            (
                *("length_*", "lengths_*", "mask_*", "resets_*", "in_axes_*", "out_axes_*", "batch_axes_*", "chunk_*"),
                *("compact_*", "fill_*", "fori_*", "reverse_*", "remat_*", "layers_*"),
                "max_length_*",
            ),
        ),
        Topic(
            "Padding and packing",
            "`pad` and `pack` take a list. `last` needs the direction of the scan.",
            ("pad_array", "last_without_direction"),
            ("pad_*", "pack_*", "unpad_*", "unpack_*", "repad_*", "last_*"),
        ),
        Topic(
            "Layers and checkpoints",
            "The message says which type the function accepts.",
            ("layer_at_traced_float",),
            ("layer_*", "checkpoint_*", "stack_*", "state_dict_*"),
        ),
        Topic(
            "A custom carry",
            "Make a carry by calling its function, for example `ema(0.0, 0.9)`. It must keep its place in `init`.",
            ("carry_class_not_called", "carry_of_another_carry"),
            ("buffer_*", "carry_*", "cast_*", "register_*", "write_tree_*", "x_of_*"),
        ),
        Topic(
            "Progress", "Pass True, a label, or a `treescan.meters.Progress`.", ("progress_number",), ("progress_*",)
        ),
        Topic("lift", "The message says what the argument must be.", ("lift_variables_not_a_dict",), ("lift_*",)),
    ),
    "TracedArgumentError": (
        Topic(
            "A value that is known only while the program runs",
            "Shapes and numbers of steps are compiled into the program. Pass an int, or mark the argument as static.",
            ("length_traced", "fori_traced", "pad_traced"),
            ("*",),
        ),
    ),
    "CheckpointError": (
        Topic(
            "The checkpoints of another run",
            "Choose another folder, or delete this one.",
            ("checkpoints_of_another_run", "checkpoints_of_two_runs"),
        ),
        Topic(
            "A checkpoint cannot be written",
            "Make room, or choose another folder. The last checkpoint is kept.",
            ("checkpoints_on_a_full_disk",),
            ("checkpoints_in_*",),
        ),
    ),
    "LayerError": (
        Topic(
            "Layers that differ",
            "All layers of one stack must have the same structure, shapes and dtypes.",
            ("stack_types_differ", "stack_structures_differ"),
            ("stack_*", "set_layer_*"),
        ),
        Topic(
            "How many layers",
            "The first axis of every leaf of a stack must be the layers.",
            ("forgotten_stack_in_fold_layers", "layers_in_a_list", "layers_of_two_depths"),
            (
                *(
                    "forgotten_*",
                    "layers_and_*",
                    "layers_length_*",
                    "layers_without_*",
                ),
                *("layer_at_*", "unstack_[!s]*", "unstack_static_*", "state_of_*"),
            ),
        ),
        Topic(
            "Several kinds of layers",
            "A pattern needs one stack for each block. Their layers take turns.",
            ("pattern_of_uneven_stacks", "pattern_with_one_stack"),
            ("pattern_*", "state_with_*", "state_that_*"),
        ),
        Topic(
            "Checkpoints",
            "The message lists the names that are missing, and the names that are not expected.",
            ("checkpoint_that_does_not_fit", "checkpoint_without_a_layer"),
            ("checkpoint_*", "state_dict_*"),
        ),
        Topic(
            "Layers on devices",
            "Do not shard the axis of the layers. Shard other axes. Layers on different devices are a pipeline.",
            ("layers_split", "pipeline_rounds_of_layers"),
            ("layers_split_*", "*_split", "*_split_*", "*shardings*", "pipeline_*"),
        ),
        Topic(
            "Boxes and names of axes",
            "The metadata of flax must have a name for the axis of the layers.",
            ("layer_axis_name_of_another_stack",),
            ("box_*", "layer_axis_*"),
        ),
    ),
    "NonFiniteError": (
        Topic(
            "A carry became NaN or infinite",
            "The message names the step, the leaf and the operation.",
            ("check_finite_finds_a_step",),
            ("*",),
        ),
    ),
    "PluginError": (
        Topic(
            "A hook of a custom carry failed",
            "The error that the hook raised is printed above this one, as its cause.",
            ("plugin_write_fails",),
            ("*_fails", "plugin_*given*"),
        ),
        Topic(
            "A hook returned something else",
            "`write` must return the same class, with the same structure, shapes and dtypes.",
            ("plugin_writes_other_dtype",),
            ("plugin_writes_*", "plugin_rows_*", "registered_*"),
        ),
        Topic(
            "A class that cannot be a carry",
            "The class must define `read` and `write`.",
            ("plugin_without_write",),
            ("plugin_*", "register_*"),
        ),
    ),
}


def kinds() -> dict[str, list[str]]:
    """The golden files by the kind of their errors, in the order of the topics; kinds without topics come last."""
    found: dict[str, list[str]] = {kind: [] for kind in TOPICS}
    for file in sorted(GOLDEN.glob("*.txt")):
        kind = re.match(r"treescan\.errors\.(\w+):", file.read_text())
        assert kind, f"{file.name} does not begin with an error"
        found.setdefault(kind[1], []).append(file.stem)
    return {kind: names for kind, names in found.items() if names}


def sections(kind: str, names: list[str]) -> Iterator[tuple[Topic, list[str]]]:
    """The topics of a kind, each with its other files. A file is in the first topic that names it."""
    shown = {name for topic in TOPICS.get(kind, ()) for name in topic.shown}
    left = [name for name in names if name not in shown]
    for topic in TOPICS.get(kind, ()):
        folded = [name for name in left if any(fnmatch.fnmatchcase(name, pattern) for pattern in topic.folded)]
        left = [name for name in left if name not in folded]
        yield topic, folded
    if left:
        yield Topic("Others", "Messages that fit none of these topics.", ()), left


def page_of(page: str) -> str:
    """The page with a new list. The text above it is written by hand."""
    head, _, _ = page.partition(START)
    parts = [head + START]
    for kind, topics in TOPICS.items():
        titles = "".join(f"- {topic.title}\n" for topic in topics)
        summary = f"<summary>{kind}: {topics[0].title}, ...</summary>"
        parts.append(f'<details class="more" markdown>\n{summary}\n\n{titles}\n</details>\n')
    return "\n".join(parts)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page_of(PAGE.read_text()))
