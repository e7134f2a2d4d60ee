//! Applications: they export, pass references on as JSON, pull and push, cancel, release, renew,
//! decline, and sometimes hold a wrong reference or a wrong idea of it.

use core::time::Duration;

use pdkv_core::ErrorKind;
use pdkv_core::block_table::BlockTable;
use pdkv_core::id::{CacheId, ExportId, PeerKey, TransferId};
use pdkv_core::node::{ExportSpec, Node, Now, TransferSpec};
use pdkv_core::plan::Selection;
use pdkv_core::reference::{ExportKind, Reference};

use super::super::host::{Begun, Exported};
use super::super::memory::Pin;
use super::{Event, World};

const PRINT: [u8; 32] = [9; 32];
const DIGEST: &[u8] = b"prompt";

/// One thing an application does.
#[derive(Clone, Debug)]
pub(super) enum App {
    Export,
    /// Make the export that a reference promises.
    Keep {
        host: usize,
        life: u32,
        reference: String,
        blocks: Vec<u32>,
        lease: Duration,
    },
    Claim {
        host: usize,
        reference: String,
        first: u32,
        count: u32,
        layers: core::ops::Range<u32>,
    },
    Cancel {
        host: usize,
        life: u32,
        transfer: TransferId,
    },
    Release {
        host: usize,
        life: u32,
        export: ExportId,
    },
    Renew {
        host: usize,
        reference: String,
    },
    Reject {
        host: usize,
        reference: String,
        consumer: u64,
    },
}

impl World {
    pub(super) fn act(&mut self, app: App) {
        match app {
            App::Export => self.export(),
            App::Keep {
                host,
                life,
                reference,
                blocks,
                lease,
            } => self.keep(host, life, &reference, blocks, lease),
            App::Claim {
                host,
                reference,
                first,
                count,
                layers,
            } => self.claim(host, &reference, first, count, layers),
            App::Cancel { host, life, transfer } => {
                let it = &mut self.hosts[host];
                if it.alive && it.life == life {
                    let now = it.clock(self.now);
                    it.node.cancel(now, transfer);
                    self.pump(host);
                }
            }
            App::Release { host, life, export } => {
                let it = &mut self.hosts[host];
                if it.alive && it.life == life {
                    let now = it.clock(self.now);
                    if let Err(error) = it.node.release(now, export) {
                        self.broken(format!("release of export {export} failed: {error}"));
                    }
                    self.pump(host);
                }
            }
            App::Renew { host, reference } => {
                let extend = self.rng.time(Duration::from_secs(3));
                self.ask(host, &reference, |node, now, peer, reference| {
                    let _ = node.renew_remote(now, peer, reference, extend);
                });
            }
            App::Reject {
                host,
                reference,
                consumer,
            } => {
                // Twice, because the second must not matter.
                for _ in 0..2 {
                    self.ask(host, &reference, |node, _, peer, reference| {
                        let _ = node.reject(peer, reference, consumer);
                    });
                }
            }
        }
    }

    fn ask(&mut self, host: usize, reference: &str, question: impl FnOnce(&mut Node, Now, PeerKey, Reference)) {
        let Ok(reference) = Reference::from_json(reference) else {
            return;
        };
        let Some(owner) = owner_of(&reference) else { return };
        if let Some(peer) = self.connect(host, owner) {
            let it = &mut self.hosts[host];
            let now = it.clock(self.now);
            question(&mut it.node, now, peer, reference);
            self.pump(host);
        }
    }

    fn export(&mut self) {
        let host = self.rng.below(self.hosts.len() as u64) as usize;
        let id = ExportId::new(self.rng.bytes());
        let kind = if self.rng.chance(500) {
            ExportKind::Export
        } else {
            ExportKind::Offer
        };
        let count = self.rng.below(9) as u32;
        let consumers = if kind == ExportKind::Export {
            1 + self.rng.below(3) as u32
        } else {
            1
        };
        let lease = Duration::from_millis(100) + self.rng.time(Duration::from_secs(3));
        let (layers, offset) = (self.config.layers, self.rng.next());
        let it = &mut self.hosts[host];
        if !it.alive {
            return;
        }
        let Some(blocks) = it.memory.allocate(count, offset, Pin::Export(id)) else {
            return;
        };
        if kind == ExportKind::Export {
            it.memory.fill(layers, &blocks, 0, id);
        }
        let spec = ExportSpec {
            id,
            kind,
            cache: CacheId(1),
            blocks: BlockTable::from_ids(&blocks),
            num_layers: layers,
            num_tokens: u64::from(count) * 16,
            digest: DIGEST.to_vec(),
            fingerprint: PRINT,
            consumers,
            lease,
        };
        let life = it.life;
        if kind == ExportKind::Export && self.rng.chance(400) {
            self.promise(host, &spec, blocks);
            return;
        }
        let it = &mut self.hosts[host];
        let now = it.clock(self.now);
        let Ok(reference) = it.node.export(now, spec) else {
            return;
        };
        it.exports.insert(id, Exported { blocks, layers });
        self.pump(host);
        self.pass_on(host, &reference, layers);
        if self.rng.chance(250) {
            self.after(
                Duration::from_secs(2),
                Event::App(App::Release { host, life, export: id }),
            );
        }
    }

    /// Passes the reference on before the export is made: sometimes long before, and now and then it never is.
    fn promise(&mut self, host: usize, spec: &ExportSpec, blocks: Vec<u32>) {
        let it = &mut self.hosts[host];
        let life = it.life;
        let issuer = it.node.issuer(spec.cache, spec.fingerprint);
        let count = blocks.len() as u32;
        let Ok(reference) = issuer.issue(count, spec.num_tokens, &spec.digest, spec.consumers, spec.id) else {
            self.broken("an issuer refused what an export would have been made of");
            return;
        };
        self.report.promised += 1;
        self.pass_on(host, &reference, spec.num_layers);
        let most = if self.rng.chance(200) { 6 } else { 2 };
        let keep = App::Keep {
            host,
            life,
            reference: reference.to_json(),
            blocks,
            lease: spec.lease,
        };
        if self.rng.chance(50) {
            let App::Keep { blocks, .. } = keep else { return };
            self.hosts[host].memory.free(&blocks);
        } else {
            self.after(Duration::from_secs(most), Event::App(keep));
        }
    }

    fn keep(&mut self, host: usize, life: u32, reference: &str, blocks: Vec<u32>, lease: Duration) {
        let layers = self.config.layers;
        let it = &mut self.hosts[host];
        let Ok(reference) = Reference::from_json(reference) else {
            return;
        };
        if !it.alive || it.life != life {
            return;
        }
        let spec = ExportSpec {
            id: reference.export_id,
            kind: reference.kind,
            cache: reference.cache,
            blocks: BlockTable::from_ids(&blocks),
            num_layers: layers,
            num_tokens: reference.num_tokens,
            digest: reference.digest.clone(),
            fingerprint: reference.fingerprint,
            consumers: reference.consumers,
            lease,
        };
        let now = it.clock(self.now);
        self.report.early += it.node.parked_claims() as u64;
        if let Err(error) = it.node.export_issued(now, spec, &reference) {
            self.broken(format!("a promised export was refused: {error}"));
            return;
        }
        let exported = Exported { blocks, layers };
        it.exports.insert(reference.export_id, exported);
        self.pump(host);
    }

    /// Hands the reference to consumers, who come in their own time, sometimes one too many.
    fn pass_on(&mut self, owner: usize, reference: &Reference, layers: u32) {
        let text = reference.to_json();
        let others: Vec<usize> = (0..self.hosts.len()).filter(|&other| other != owner).collect();
        let whole = (0, reference.num_blocks, 0..layers);
        let mut parts = vec![whole; reference.consumers as usize];
        if reference.kind == ExportKind::Offer && self.rng.chance(700) {
            let half = reference.num_blocks / 2;
            parts = vec![
                (0, half, 0..layers),
                (half, reference.num_blocks - half, 0..1),
                (half, reference.num_blocks - half, 1..layers),
            ];
        }
        if self.rng.chance(200) {
            parts.push((0, reference.num_blocks, 0..layers));
        }
        for (number, (first, count, layers)) in parts.into_iter().enumerate() {
            let host = others[self.rng.below(others.len() as u64) as usize];
            let reference = text.clone();
            let app = match self.rng.below(20) {
                0 => App::Reject {
                    host,
                    reference,
                    consumer: number as u64,
                },
                1 => continue,
                _ => App::Claim {
                    host,
                    reference,
                    first,
                    count,
                    layers,
                },
            };
            self.after(Duration::from_secs(2), Event::App(app));
        }
        if self.rng.chance(300) {
            let app = App::Renew {
                host: others[0],
                reference: text,
            };
            self.after(Duration::from_secs(1), Event::App(app));
        }
    }

    fn claim(&mut self, host: usize, reference: &str, first: u32, count: u32, layers: core::ops::Range<u32>) {
        let Ok(mut reference) = Reference::from_json(reference) else {
            return;
        };
        let Some(owner) = owner_of(&reference) else { return };
        let (kind, export) = (reference.kind, reference.export_id);
        let Some(peer) = self.connect(host, owner) else { return };
        let (mut digest, mut print, mut first_block) = (DIGEST.to_vec(), PRINT, first);
        let spoiled = match self.rng.below(24) {
            0 => {
                digest.push(0);
                Some(ErrorKind::ReferenceDigest)
            }
            1 => {
                print[31] ^= 1;
                Some(ErrorKind::ReferenceFingerprint)
            }
            2 => {
                reference.num_tokens ^= 1 << self.rng.below(63);
                Some(ErrorKind::ReferenceForged)
            }
            3 => {
                reference.tag[self.rng.below(16) as usize] ^= 0x40;
                Some(ErrorKind::ReferenceForged)
            }
            4 if count > 0 => {
                first_block += 1 + self.rng.below(1000) as u32 + reference.num_blocks;
                Some(ErrorKind::Layout)
            }
            _ => None,
        };
        let timeout = Duration::from_millis(50) + self.rng.time(Duration::from_secs(3));
        let wants_table = self.rng.chance(600);
        let offset = self.rng.next();
        let spec = TransferSpec {
            reference,
            expected_digest: self.rng.chance(800).then_some(digest).or(match spoiled {
                Some(ErrorKind::ReferenceDigest) => Some(vec![1]),
                _ => None,
            }),
            expected_fingerprint: print,
            first_block,
            num_blocks: count,
            selection: Selection::layers(layers.start, layers.end - layers.start),
            transport: "sim".to_owned(),
            timeout,
            wants_table,
            order: None,
        };
        let now = self.hosts[host].clock(self.now);
        let it = &mut self.hosts[host];
        // The blocks are taken before the transfer has its number; it gets them right after.
        let Some(blocks) = it.memory.allocate(count, offset, Pin::Transfer(TransferId(0))) else {
            return;
        };
        let Ok(transfer) = it.node.begin(now, peer, spec) else {
            it.memory.free(&blocks);
            return;
        };
        it.memory.repin(&blocks, Pin::Transfer(transfer));
        if kind == ExportKind::Offer {
            it.memory.fill(self.config.layers, &blocks, first, export);
        }
        let begun = Begun {
            kind,
            export,
            blocks,
            first_block: first,
            layers,
            deadline: now + timeout,
            spoiled,
            finished: false,
            moved: false,
        };
        it.transfers.insert(transfer, begun);
        let life = it.life;
        self.report.begun += 1;
        if self.rng.chance(150) {
            self.after(timeout, Event::App(App::Cancel { host, life, transfer }));
        }
        self.pump(host);
    }
}

fn owner_of(reference: &Reference) -> Option<usize> {
    reference.address.strip_prefix("sim:")?.parse().ok()
}
