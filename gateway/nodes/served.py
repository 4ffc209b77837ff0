"""Which models can be served now, and by which text: found once between changes of the fleet."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.nodes.bundles import Bundles
from gateway.nodes.engines import Engine
from gateway.nodes.node import Node
from gateway.nodes.views import ServedModel
from policies.contract.wire import NodeState


class ServedModels:
    """Reads the fleet's nodes; the fleet calls `forget` when any of them changed."""

    def __init__(
        self, node_by_id: Mapping[str, Node], bundles: Bundles, default_models: tuple[str, ...]
    ) -> None:
        self._node_by_id = node_by_id
        self._bundles = bundles
        self._default_models = default_models
        self._names: dict[str, None] = {}  # in the order they first joined
        self._found: dict[str, ServedModel | None] = {}

    def note(self, name: str) -> None:
        """A node announced this model; its place in the list is kept."""
        self._names.setdefault(name)

    def forget(self) -> None:
        """Something changed: look again when asked."""
        self._found.clear()

    def is_servable(self, engine: Engine) -> bool:
        return engine.ready and self._bundles.text(engine.info.bundle_digest) is not None

    def state(self, node: Node) -> NodeState:
        return node.state(
            servable=any(self.is_servable(engine) for engine in node.engine_by_index.values())
        )

    def all(self) -> list[ServedModel]:
        """Configured defaults first, then as joined, aliases last."""
        first = [name for name in self._default_models if name in self._names]
        names = dict.fromkeys([*first, *self._names])
        served = [model for name in names if (model := self._real(name))]
        taken = {model.name for model in served}
        aliases: dict[str, ServedModel] = {}
        for model in served:
            for alias in model.info.aliases:
                if alias not in taken and alias not in aliases:
                    aliases[alias] = ServedModel(
                        alias, model.info, model.text, model.nodes, alias_of=model.name
                    )
        return served + list(aliases.values())

    def find(self, name: str) -> ServedModel | None:
        """By name or alias."""
        return self._real(name) or next((model for model in self.all() if model.name == name), None)

    def _real(self, name: str) -> ServedModel | None:
        if name not in self._names:
            return None
        if name not in self._found:
            self._found[name] = self._look(name)
        return self._found[name]

    def _look(self, name: str) -> ServedModel | None:
        infos = [
            engine.info
            for node in self._node_by_id.values()
            if self.state(node) == "ready"
            for engine in node.engine_by_index.values()
            if engine.info.model == name and self.is_servable(engine)
        ]
        if not infos:
            return None
        # While one computes exactly, that is what the name promises, and the others stand by.
        first = next((info for info in infos if info.compute == "exact"), infos[0])
        alike = [
            info
            for info in infos
            if (info.bundle_digest, info.compute) == (first.bundle_digest, first.compute)
        ]
        text = self._bundles.text(first.bundle_digest)
        assert text is not None  # is_servable
        return ServedModel(name, first, text, len(alike), alias_of=None)
