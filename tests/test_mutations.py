"""Mutations fit the sources as they are. The suites that apply them, mutations and
kernel-mutations, take long and run seldom."""
import pytest

import kernel_mutations
import mutations


@pytest.mark.parametrize("name", sorted(mutations.MUTATIONS))
def test_mutation_of_the_reference(name):
    mutations.mutated(name)  # raises unless its text is there once


@pytest.mark.parametrize("name", sorted(kernel_mutations.MUTATIONS))
def test_mutation_of_a_kernel(name):
    text, changed = kernel_mutations.mutated(name)  # raises unless its pattern is there once
    assert changed != text
    assert set(kernel_mutations.MUTATIONS[name].cases) <= set(kernel_mutations.CASES)


@pytest.mark.parametrize("folder", sorted(kernel_mutations.ROWS))
def test_table_of_mutated_kernels(folder):
    path = kernel_mutations.ROOT / kernel_mutations.KERNELS / folder / "table.txt"
    kernel_mutations.short_table(path)  # raises unless its rows are there
