//! A radix tree over tokens, which knows at each node who ends there and who is below. It decides nothing about order:
//! it is given one, and keeps its sets sorted by it.

use std::collections::BTreeMap;

use super::members::Members;
use super::order::{Order, Slot};

/// Index of a node.
pub(super) type NodeId = u32;

/// Where all tokens begin.
const ROOT: NodeId = 0;

#[derive(Clone, Debug, Default)]
struct Node {
    /// The tokens from the parent to here; empty at the root only.
    edge: Vec<i64>,
    parent: NodeId,
    children: BTreeMap<i64, NodeId>,
    /// Those in sight that end here.
    here: Members,
    /// Those in sight that end here or further down.
    below: Members,
    /// How many end here, in sight or not.
    ends: u32,
}

/// A candidate on the way down: who comes first there, and how many tokens agree.
pub(super) struct Candidate {
    /// The first of those that match to this depth.
    pub(super) slot: Slot,
    /// How many tokens were compared equal: all of the query's or all of the entry's.
    pub(super) matched: usize,
}

/// The tree.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    free: Vec<NodeId>,
}

impl Default for Tree {
    fn default() -> Self {
        Self {
            nodes: vec![Node::default()],
            free: Vec::new(),
        }
    }
}

impl Tree {
    /// Adds an entry with these tokens, in sight; returns the node where it ends.
    pub(super) fn insert(&mut self, tokens: &[i64], slot: Slot, order: &Order) -> NodeId {
        let node = self.reach(tokens);
        self.nodes[node as usize].ends += 1;
        self.show(node, slot, order);
        node
    }

    /// Puts an entry that ends at `node` in sight.
    pub(super) fn show(&mut self, node: NodeId, slot: Slot, order: &Order) {
        self.nodes[node as usize].here.insert(slot, order);
        self.each_up(node, |members| members.insert(slot, order));
    }

    /// Takes an entry that ends at `node` out of sight; its tokens stay.
    pub(super) fn hide(&mut self, node: NodeId, slot: Slot, order: &Order) {
        self.nodes[node as usize].here.remove(slot, order);
        self.each_up(node, |members| members.remove(slot, order));
    }

    /// Forgets an entry that ends at `node` and is out of sight.
    pub(super) fn remove(&mut self, node: NodeId) {
        self.nodes[node as usize].ends -= 1;
        self.tidy(node);
    }

    /// Who comes first of all.
    pub(super) fn front(&self, order: &Order) -> Option<Slot> {
        self.nodes[ROOT as usize].below.first(order)
    }

    /// All that are in sight, from the smallest label on.
    pub(super) fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        self.nodes[ROOT as usize].below.iter()
    }

    /// Walks along `tokens` and calls `meet` with the first entry at each depth of which one side's tokens are a
    /// prefix of the other's, shortest first.
    pub(super) fn walk(&self, tokens: &[i64], order: &Order, mut meet: impl FnMut(Candidate)) {
        let mut node = &self.nodes[ROOT as usize];
        let mut depth = 0;
        while depth < tokens.len() {
            let Some(child) = node.children.get(&tokens[depth]) else {
                return;
            };
            node = &self.nodes[*child as usize];
            let rest = &tokens[depth..];
            let shared = node.edge.len().min(rest.len());
            if node.edge[..shared] != rest[..shared] {
                return;
            }
            depth += shared;
            let found = if depth == tokens.len() { &node.below } else { &node.here };
            if let Some(slot) = found.first(order) {
                meet(Candidate { slot, matched: depth });
            }
        }
    }

    fn each_up(&mut self, node: NodeId, mut change: impl FnMut(&mut Members)) {
        let mut at = node;
        loop {
            let node = &mut self.nodes[at as usize];
            change(&mut node.below);
            if at == ROOT {
                return;
            }
            at = node.parent;
        }
    }

    /// The node at which `tokens` end, made where it is missing.
    fn reach(&mut self, tokens: &[i64]) -> NodeId {
        let (mut at, mut depth) = (ROOT, 0);
        while depth < tokens.len() {
            let rest = &tokens[depth..];
            let Some(&child) = self.nodes[at as usize].children.get(&rest[0]) else {
                return self.grow(at, rest);
            };
            let edge = &self.nodes[child as usize].edge;
            let shared = edge
                .iter()
                .zip(rest)
                .take_while(|(here, wanted)| here == wanted)
                .count();
            at = if shared < edge.len() {
                self.split(child, shared)
            } else {
                child
            };
            depth += shared;
        }
        at
    }

    fn grow(&mut self, parent: NodeId, edge: &[i64]) -> NodeId {
        let child = self.allot(Node {
            edge: edge.to_vec(),
            parent,
            ..Node::default()
        });
        self.nodes[parent as usize].children.insert(edge[0], child);
        child
    }

    /// Puts a node into the edge to `child`, after its first `shared` tokens.
    fn split(&mut self, child: NodeId, shared: usize) -> NodeId {
        let node = &mut self.nodes[child as usize];
        let rest = node.edge.split_off(shared);
        let first = rest[0];
        let edge = std::mem::replace(&mut node.edge, rest);
        let (parent, below, start) = (node.parent, node.below.clone(), edge[0]);
        let middle = self.allot(Node {
            edge,
            parent,
            children: BTreeMap::from([(first, child)]),
            below,
            ..Node::default()
        });
        self.nodes[child as usize].parent = middle;
        self.nodes[parent as usize].children.insert(start, middle);
        middle
    }

    /// Removes nodes that nobody needs, from `node` upwards.
    fn tidy(&mut self, node: NodeId) {
        let mut at = node;
        while at != ROOT && self.nodes[at as usize].ends == 0 {
            match self.nodes[at as usize].children.len() {
                0 => {
                    let gone = std::mem::take(&mut self.nodes[at as usize]);
                    self.free.push(at);
                    self.nodes[gone.parent as usize].children.remove(&gone.edge[0]);
                    at = gone.parent;
                }
                1 => return self.merge(at),
                _ => return,
            }
        }
    }

    /// Joins a node that has one child and ends nothing with that child.
    fn merge(&mut self, node: NodeId) {
        let gone = std::mem::take(&mut self.nodes[node as usize]);
        self.free.push(node);
        let mut edge = gone.edge;
        for child in gone.children.into_values() {
            let start = edge[0];
            let heir = &mut self.nodes[child as usize];
            edge.append(&mut heir.edge);
            heir.edge = std::mem::take(&mut edge);
            heir.parent = gone.parent;
            self.nodes[gone.parent as usize].children.insert(start, child);
        }
    }

    fn allot(&mut self, node: Node) -> NodeId {
        if let Some(id) = self.free.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        self.nodes.push(node);
        (self.nodes.len() - 1) as NodeId
    }

    /// How many nodes there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.nodes.len() - self.free.len()
    }
}
