//! What the fuzz targets of `fuzz/` run, and `tests/hostile.rs` with random input: no bytes from a peer
//! may panic, hang, or leave anything behind.
#![allow(dead_code, unreachable_pub, unused_imports)] // each user takes its own part

mod bytes;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use pdkv_core::block_table::BlockTable;
use pdkv_core::error::{Error, ErrorKind};
use pdkv_core::id::{CacheId, ExportId, Incarnation, PeerKey, TransferId};
use pdkv_core::issuer::Issuer;
use pdkv_core::node::{Action, ExportSpec, Identity, Node, NodeConfig, Now, RemotePeer, Role, TransferSpec};
use pdkv_core::plan::Selection;
use pdkv_core::reference::{ExportKind, Reference};
use pdkv_core::wire::{
    Abandon, Ack, Advertise, Claim, ClaimStatus, Done, Fault, Goodbye, Grant, Message, Nack, Notify, Ping, Pong,
    Refuse, Reject, Renew, Renewed, Revoke, Status, StatusReply, Unknown,
};

pub use bytes::{frames, issuer, pipe, reference_json};

const OTHERS_LIFE: Incarnation = Incarnation::new([2; 16]);
const PRINT: [u8; 32] = [3; 32];

/// Reads a script byte by byte; zeros after its end.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> u8 {
        let (first, rest) = self.0.split_first().map_or((0, &[][..]), |(&b, rest)| (b, rest));
        self.0 = rest;
        first
    }

    fn one_in(&mut self, n: u8) -> bool {
        self.byte().is_multiple_of(n)
    }

    fn small(&mut self) -> u64 {
        u64::from(self.byte() % 12)
    }

    fn number(&mut self) -> u32 {
        match self.byte() {
            255 => u32::MAX,
            b => u32::from(b % 8),
        }
    }
}

struct Bench {
    node: Node,
    now: Now,
    /// The peer whose exports we claim.
    owner: PeerKey,
    /// The peer that claims ours, and those before it.
    clients: Vec<PeerKey>,
    next_key: u64,
    next_claim: u64,
    references: Vec<Reference>,
    moving: BTreeSet<TransferId>,
    finished: BTreeMap<TransferId, u32>,
    quiesced: BTreeMap<TransferId, u32>,
    begun: u32,
    issuer: Option<Issuer>,
}

/// Any sequence of calls and messages. Whatever a peer says, everything ends exactly once.
pub fn node(data: &[u8]) {
    let config = NodeConfig {
        max_transfers_per_peer: 6,
        max_exports: 6,
        max_tombstones: 3,
        max_early_claims_per_peer: 3,
        max_early_claims: 4,
        ..NodeConfig::default()
    };
    let identity = Identity {
        name: "fuzzed".to_owned(),
        incarnation: Incarnation::new([1; 16]),
        address: String::new(),
        mac_key: [4; 32],
    };
    let mut bench = Bench {
        node: Node::new(config, identity),
        now: Duration::from_secs(1),
        owner: PeerKey(0),
        clients: Vec::new(),
        next_key: 1,
        next_claim: 1,
        references: Vec::new(),
        moving: BTreeSet::new(),
        finished: BTreeMap::new(),
        quiesced: BTreeMap::new(),
        begun: 0,
        issuer: None,
    };
    bench.up(Role::Initiator);
    bench.up(Role::Owner);
    // Half of the scripts are for an owner that issues references ahead.
    bench.issuer = data
        .len()
        .is_multiple_of(2)
        .then(|| bench.node.issuer(CacheId(1), PRINT));
    let mut script = Script(data);
    while !script.0.is_empty() {
        bench.play(&mut script);
        bench.drain();
    }
    bench.end();
}

impl Bench {
    fn up(&mut self, role: Role) {
        let peer = PeerKey(self.next_key);
        self.next_key += 1;
        let remote = RemotePeer {
            name: "peer".to_owned(),
            incarnation: OTHERS_LIFE,
            peer_timeout: Duration::from_secs(5),
        };
        self.node.peer_up(self.now, peer, role, remote);
        match role {
            Role::Initiator => self.owner = peer,
            Role::Owner => self.clients.push(peer),
        }
    }

    fn client(&self) -> PeerKey {
        *self.clients.last().expect("one is up")
    }

    /// A channel goes down and another life of the same peer comes up.
    fn down(&mut self, peer: PeerKey, error: &Error) {
        self.node.peer_down(self.now, peer, error);
        let role = if peer == self.owner {
            Role::Initiator
        } else {
            Role::Owner
        };
        self.up(role);
    }

    /// One of the transfers begun last, or one that never was.
    fn transfer(&self, script: &mut Script<'_>) -> TransferId {
        TransferId((u64::from(self.begun) + 1).saturating_sub(script.small() % 5))
    }

    /// One of the last claims on us.
    fn claim(&self, script: &mut Script<'_>) -> TransferId {
        TransferId(self.next_claim.saturating_sub(script.small() % 5))
    }

    fn play(&mut self, script: &mut Script<'_>) {
        let now = self.now;
        match script.byte() % 12 {
            0 => {
                self.now += Duration::from_millis(u64::from(script.byte()) * 20);
                self.node.tick(self.now);
            }
            1 => self.export(script),
            2 => {
                let mut reference = self.reference(script);
                reference.incarnation = OTHERS_LIFE;
                let spec = TransferSpec {
                    reference,
                    expected_digest: None,
                    expected_fingerprint: PRINT,
                    first_block: script.number(),
                    num_blocks: script.number(),
                    selection: Selection::layers(script.number(), script.number()),
                    transport: "tcp".to_owned(),
                    timeout: Duration::from_millis(u64::from(script.byte()) * 10),
                    wants_table: script.one_in(2),
                    order: None,
                };
                self.begun += u32::from(self.node.begin(now, self.owner, spec).is_ok());
            }
            3 => {
                let transfer = self.transfer(script);
                let result = if script.one_in(2) { Ok(1) } else { Err(lost()) };
                // A mover reports once; a stray report must not matter either.
                self.moving.remove(&transfer);
                self.node.moved(now, transfer, result);
            }
            4 => {
                let transfer = self.transfer(script);
                self.node.cancel(now, transfer);
            }
            5 => {
                let export = self.reference(script).export_id;
                let _ = self.node.release(now, export);
            }
            6 => {
                let (client, transfer) = (self.client(), self.claim(script));
                self.node.serve_started(client, transfer);
                if !script.one_in(4) {
                    let result = if script.one_in(2) { Ok(()) } else { Err(lost()) };
                    self.node.serve_ended(now, client, transfer, result);
                }
            }
            7 if script.one_in(8) => self.node.writer_dead(now, self.client()),
            8 if script.one_in(8) => {
                let peer = if script.one_in(2) { self.owner } else { self.client() };
                self.down(peer, &lost());
            }
            _ => {
                let from_owner = script.one_in(2);
                let mut message = if from_owner {
                    self.owner_says(script)
                } else {
                    self.client_says(script)
                };
                if script.one_in(8) {
                    message = anybody_says(script);
                }
                // Now and then from the wrong side.
                let wrong_side = script.one_in(32);
                let peer = if from_owner == wrong_side {
                    self.client()
                } else {
                    self.owner
                };
                if let Err(error) = self.node.handle(now, peer, message) {
                    assert_eq!(error.kind(), ErrorKind::Handshake);
                    self.down(peer, &error);
                }
            }
        }
    }

    fn export(&mut self, script: &mut Script<'_>) {
        let blocks: Vec<u32> = (0..u32::from(script.byte() % 8)).map(|b| b * 2).collect();
        let kind = if script.one_in(2) {
            ExportKind::Export
        } else {
            ExportKind::Offer
        };
        let spec = ExportSpec {
            id: ExportId::new([script.byte(); 16]),
            kind,
            cache: CacheId(1),
            blocks: BlockTable::from_ids(&blocks),
            num_layers: u32::from(script.byte() % 4),
            num_tokens: 1,
            digest: vec![5],
            fingerprint: PRINT,
            consumers: if kind == ExportKind::Offer {
                1
            } else {
                u32::from(script.byte() % 4)
            },
            lease: Duration::from_millis(u64::from(script.byte()) * 50),
        };
        if let Some(issuer) = self.issuer.as_ref().filter(|_| script.one_in(2)) {
            let count = spec.blocks.len() as u32;
            let promised = issuer.issue(count, 1, &spec.digest, spec.consumers, spec.id);
            self.references.extend(promised);
        } else if self.issuer.is_some() && script.one_in(2) {
            self.keep_promise(script, spec.lease);
        } else if let Ok(reference) = self.node.export(self.now, spec) {
            self.references.push(reference);
        }
    }

    /// Makes what some reference promises, or is refused.
    fn keep_promise(&mut self, script: &mut Script<'_>, lease: Duration) {
        let reference = self.reference(script);
        let ids: Vec<u32> = (0..reference.num_blocks.min(8)).collect();
        let spec = ExportSpec {
            id: reference.export_id,
            kind: reference.kind,
            cache: reference.cache,
            blocks: BlockTable::from_ids(&ids),
            num_layers: 2,
            num_tokens: reference.num_tokens,
            digest: reference.digest.clone(),
            fingerprint: PRINT,
            consumers: reference.consumers,
            lease,
        };
        let _ = self.node.export_issued(self.now, spec, &reference);
    }

    fn reference(&self, script: &mut Script<'_>) -> Reference {
        let chosen = self
            .references
            .get(script.byte() as usize % self.references.len().max(1))
            .cloned();
        let mut reference = chosen.unwrap_or_else(|| Reference {
            version: 1,
            kind: ExportKind::Export,
            engine: String::new(),
            address: String::new(),
            incarnation: Incarnation::new([1; 16]),
            export_id: ExportId::new([0; 16]),
            cache: CacheId(1),
            digest: Vec::new(),
            fingerprint: PRINT,
            num_tokens: 0,
            num_blocks: 4,
            consumers: 1,
            tag: [0; 16],
        });
        if script.one_in(16) {
            reference.tag[0] ^= 1;
        }
        reference
    }

    fn fault(script: &mut Script<'_>) -> Fault {
        let kind = ErrorKind::from_code(u32::from(script.byte() % 26));
        Fault {
            kind,
            message: "m".to_owned(),
            hint: String::new(),
        }
    }

    fn owner_says(&self, script: &mut Script<'_>) -> Message {
        let transfer = self.transfer(script);
        let fault = Self::fault(script);
        match script.byte() % 16 {
            0..=5 => {
                let ids: Vec<u32> = (0..script.number().min(8)).collect();
                let blocks = (script.one_in(2)).then(|| BlockTable::from_ids(&ids));
                let remaining = Duration::from_millis(u64::from(script.byte()) * 10);
                Message::Grant(Grant {
                    transfer,
                    cache: CacheId(1),
                    num_blocks: ids.len() as u32,
                    blocks,
                    remaining,
                })
            }
            6 => Message::Refuse(Refuse { transfer, fault }),
            7..=9 => Message::Ack(Ack { transfer }),
            10 => Message::Nack(Nack { transfer, fault }),
            11 | 12 => Message::Revoke(Revoke { transfer, fault }),
            13 => Message::Renewed(Renewed {
                request: script.small(),
                result: Err(fault),
            }),
            _ => {
                let all = [
                    ClaimStatus::Unknown,
                    ClaimStatus::Active,
                    ClaimStatus::Completed,
                    ClaimStatus::Failed(fault),
                ];
                Message::StatusReply(StatusReply {
                    transfer,
                    status: all[script.byte() as usize % 4].clone(),
                })
            }
        }
    }

    fn client_says(&mut self, script: &mut Script<'_>) -> Message {
        let transfer = self.claim(script);
        let remaining = Duration::from_millis(u64::from(script.byte()) * 10);
        match script.byte() % 16 {
            0..=6 => {
                self.next_claim += 1;
                Message::Claim(Box::new(Claim {
                    transfer: TransferId(self.next_claim - script.small() % 12 / 11),
                    reference: self.reference(script),
                    expected_digest: (script.one_in(4)).then(|| vec![5]),
                    expected_fingerprint: PRINT,
                    first_block: script.number(),
                    num_blocks: script.number(),
                    first_layer: script.number(),
                    num_layers: script.number(),
                    transport: "tcp".to_owned(),
                    remaining,
                    wants_table: script.one_in(2),
                    order: None,
                }))
            }
            7..=9 => Message::Done(Done { transfer, bytes: 1 }),
            10 | 11 => Message::Abandon(Abandon {
                transfer,
                reason: ErrorKind::Transfer,
            }),
            12 => Message::Renew(Box::new(Renew {
                request: 1,
                reference: self.reference(script),
                extend: remaining,
            })),
            13 => Message::Reject(Box::new(Reject {
                reference: self.reference(script),
                consumer: script.small(),
            })),
            _ => Message::Status(Status { transfer }),
        }
    }

    fn drain(&mut self) {
        while let Some(action) = self.node.poll_action() {
            match action {
                Action::Move { transfer, .. } => assert!(self.moving.insert(transfer), "moved twice"),
                Action::Finished { transfer, .. } => *self.finished.entry(transfer).or_default() += 1,
                Action::Quiesced { transfer } => {
                    assert_eq!(self.finished.get(&transfer), Some(&1), "quiesced before it finished");
                    assert!(!self.moving.contains(&transfer), "quiesced while the mover runs");
                    *self.quiesced.entry(transfer).or_default() += 1;
                }
                Action::Close { peer, .. } => self.down(peer, &lost()),
                _ => {}
            }
        }
    }

    /// Peers go, movers stop, time passes: nothing may be left.
    fn end(&mut self) {
        self.node.peer_down(self.now, self.owner, &lost());
        self.node.peer_down(self.now, self.client(), &lost());
        self.drain();
        for transfer in std::mem::take(&mut self.moving) {
            self.node.moved(self.now, transfer, Err(lost()));
        }
        for client in std::mem::take(&mut self.clients) {
            self.node.writer_dead(self.now, client);
            for transfer in (0..=self.next_claim).map(TransferId) {
                // A stream of ours that the script left open, as often as it was opened.
                while self.node.claim_view(client, transfer).is_some() {
                    self.node.serve_ended(self.now, client, transfer, Ok(()));
                }
            }
        }
        self.now += Duration::from_secs(4000);
        self.node.tick(self.now);
        self.drain();
        let left = (
            self.node.live_transfers(),
            self.node.live_claims(),
            self.node.live_exports(),
        );
        assert_eq!(left, (0, 0, 0), "transfers, claims, exports");
        assert_eq!(self.node.parked_claims(), 0);
        assert!(self.node.next_deadline().is_none(), "a timer is left");
        for counts in [&self.finished, &self.quiesced] {
            assert_eq!(counts.len() as u32, self.begun);
            assert!(counts.values().all(|&n| n == 1));
        }
    }
}

fn lost() -> Error {
    Error::new(ErrorKind::PeerLost, "fuzz", "lost")
}

fn anybody_says(script: &mut Script<'_>) -> Message {
    match script.byte() % 8 {
        0 => Message::Notify(Notify { bytes: vec![1] }),
        1 => Message::Ping(Ping { sequence: 1 }),
        2 => Message::Advertise(Advertise::default()),
        3 => Message::Unknown(Unknown {
            critical: script.one_in(8),
        }),
        4 if script.one_in(8) => Message::Goodbye(Goodbye { reason: String::new() }),
        _ => Message::Pong(Pong { sequence: 0 }),
    }
}
