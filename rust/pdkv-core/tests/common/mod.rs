//! Two nodes joined by a perfect network, and what tests want of them.
#![allow(dead_code, unreachable_pub)] // each test file uses its own part

use core::time::Duration;

use pdkv_core::block_table::BlockTable;
use pdkv_core::id::{CacheId, ExportId, Incarnation, PeerKey, TransferId};
use pdkv_core::issuer::Issuer;
use pdkv_core::node::{Action, ExportSpec, Identity, Node, NodeConfig, Now, Outcome, RemotePeer, Role, TransferSpec};
use pdkv_core::plan::Selection;
use pdkv_core::reference::{ExportKind, Reference};
use pdkv_core::wire::{FrameDecoder, MAX_FRAME, Message, encode};

pub const S: Duration = Duration::from_secs(1);
pub const PRINT: [u8; 32] = [7; 32];
/// The channel as each side calls it.
pub const TO_OWNER: PeerKey = PeerKey(11);
pub const TO_INITIATOR: PeerKey = PeerKey(22);

pub fn identity(name: &str, life: u8) -> Identity {
    Identity {
        name: name.to_owned(),
        incarnation: Incarnation::new([life; 16]),
        address: format!("{name}:1"),
        mac_key: [life ^ 0x55; 32],
    }
}

pub fn remote(node: &Node) -> RemotePeer {
    RemotePeer {
        name: node.identity().name.clone(),
        incarnation: node.identity().incarnation,
        peer_timeout: node.config().peer_timeout,
    }
}

/// What a message is after a trip over the wire.
pub fn over_the_wire(message: &Message) -> Message {
    let mut decoder = FrameDecoder::new(MAX_FRAME);
    decoder.push(&encode(message).expect("fits a frame"));
    decoder.next().expect("decodes").expect("whole")
}

pub struct Pair {
    pub now: Now,
    pub initiator: Node,
    pub owner: Node,
    next_export: u8,
}

impl Pair {
    pub fn new() -> Self {
        Self::with(NodeConfig::default())
    }

    pub fn with(config: NodeConfig) -> Self {
        let mut initiator = Node::new(config.clone(), identity("decode", 1));
        let mut owner = Node::new(config, identity("prefill", 2));
        initiator.peer_up(S, TO_OWNER, Role::Initiator, remote(&owner));
        owner.peer_up(S, TO_INITIATOR, Role::Owner, remote(&initiator));
        Self {
            now: S,
            initiator,
            owner,
            next_export: 1,
        }
    }

    pub fn export(&mut self, kind: ExportKind, blocks: u32, num_layers: u32, consumers: u32) -> Reference {
        let id = ExportId::new([self.next_export; 16]);
        self.next_export += 1;
        let ids: Vec<u32> = (0..blocks).map(|b| b * 3).collect();
        let spec = ExportSpec {
            id,
            kind,
            cache: CACHE,
            blocks: BlockTable::from_ids(&ids),
            num_layers,
            num_tokens: u64::from(blocks) * 16,
            digest: b"prompt".to_vec(),
            fingerprint: PRINT,
            consumers,
            lease: S * 30,
        };
        self.owner.export(self.now, spec).expect("export")
    }

    pub fn spec(reference: &Reference, first_block: u32, num_blocks: u32, layers: (u32, u32)) -> TransferSpec {
        TransferSpec {
            reference: reference.clone(),
            expected_digest: Some(b"prompt".to_vec()),
            expected_fingerprint: PRINT,
            first_block,
            num_blocks,
            selection: Selection::layers(layers.0, layers.1),
            transport: "shm".to_owned(),
            timeout: S * 10,
            wants_table: true,
            order: None,
        }
    }

    pub fn begin(&mut self, reference: &Reference, first: u32, count: u32, layers: (u32, u32)) -> TransferId {
        let spec = Self::spec(reference, first, count, layers);
        self.initiator.begin(self.now, TO_OWNER, spec).expect("begin")
    }

    /// Carries messages both ways until nothing moves; gives the other actions of each side.
    pub fn exchange(&mut self) -> (Vec<Action>, Vec<Action>) {
        let (mut of_initiator, mut of_owner) = (Vec::new(), Vec::new());
        loop {
            let mut quiet = true;
            while let Some(action) = self.initiator.poll_action() {
                quiet = false;
                match action {
                    Action::Send { message, .. } => {
                        let message = over_the_wire(&message);
                        self.owner.handle(self.now, TO_INITIATOR, message).expect("honest");
                    }
                    other => of_initiator.push(other),
                }
            }
            while let Some(action) = self.owner.poll_action() {
                quiet = false;
                match action {
                    Action::Send { message, .. } => {
                        let message = over_the_wire(&message);
                        self.initiator.handle(self.now, TO_OWNER, message).expect("honest");
                    }
                    other => of_owner.push(other),
                }
            }
            if quiet {
                return (of_initiator, of_owner);
            }
        }
    }

    /// Lets time pass on both sides, carrying messages at each deadline.
    pub fn pass(&mut self, time: Duration) -> (Vec<Action>, Vec<Action>) {
        let end = self.now + time;
        let (mut of_initiator, mut of_owner) = self.exchange();
        loop {
            let next = [self.initiator.next_deadline(), self.owner.next_deadline()]
                .into_iter()
                .flatten()
                .min();
            self.now = next.unwrap_or(end).clamp(self.now, end);
            self.initiator.tick(self.now);
            self.owner.tick(self.now);
            let (i, o) = self.exchange();
            of_initiator.extend(i);
            of_owner.extend(o);
            if self.now == end {
                return (of_initiator, of_owner);
            }
        }
    }
}

/// The cache whose references are issued ahead.
pub const CACHE: CacheId = CacheId(5);

pub fn issuer(pair: &mut Pair) -> Issuer {
    pair.owner.issuer(CACHE, PRINT)
}

pub fn promise(issuer: &Issuer, id: u8, consumers: u32) -> Reference {
    let id = ExportId::new([id; 16]);
    issuer.issue(4, 64, b"prompt", consumers, id).expect("issued")
}

/// What keeps the promise.
pub fn promised(reference: &Reference) -> ExportSpec {
    ExportSpec {
        id: reference.export_id,
        kind: ExportKind::Export,
        cache: CACHE,
        blocks: BlockTable::from_ids(&[3, 6, 9, 12]),
        num_layers: 2,
        num_tokens: 64,
        digest: b"prompt".to_vec(),
        fingerprint: PRINT,
        consumers: reference.consumers,
        lease: S * 30,
    }
}

pub fn outcome(actions: &[Action], of: TransferId) -> Option<&Outcome> {
    let mut outcomes = actions.iter().filter_map(|action| match action {
        Action::Finished { transfer, outcome } if *transfer == of => Some(outcome),
        _ => None,
    });
    let first = outcomes.next();
    assert!(outcomes.next().is_none(), "finished twice");
    first
}

pub fn quiesced(actions: &[Action], of: TransferId) -> bool {
    actions
        .iter()
        .filter(|a| matches!(a, Action::Quiesced { transfer } if *transfer == of))
        .count()
        == 1
}
