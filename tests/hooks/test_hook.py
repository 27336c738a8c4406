def test_a_hook_has_no_offload() -> None:
    """A class attribute that would have no effect is refused where it is written."""
    with pytest.raises(TypeError, match=r"Away.offload has no effect, .* async def"):

        class Away(Hook):
            offload = "process"

            def after_train_iter(self, trainer: Any, event: Any) -> None: ...
