from lightning_axosparse.distributed.mpi.connect import describe_connections


def test_the_log_says_how_adjacent_stages_exchange_messages() -> None:
    said = describe_connections([True, True], True, True)
    assert said == "All adjacent stages exchange activations through shared memory."
    said = describe_connections([True, False, False], True, True)
    assert "2 of 3 pairs" in said
    assert said.endswith("MPI transfers a message while its sender computes.")
    said = describe_connections([False], False, True)
    assert "only while its sender is inside MPI: a thread" in said
    said = describe_connections([False], False, False)
    assert "does not provide MPI_THREAD_MULTIPLE" in said
