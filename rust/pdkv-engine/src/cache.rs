//! A registered KV cache: exporting and offering its blocks, pulling and pushing them.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pdkv_core::block_table::BlockTable;
use pdkv_core::capability::{Require, Wish};
use pdkv_core::export::ExportSpec;
use pdkv_core::id::CacheId;
use pdkv_core::layout::KvLayout;
use pdkv_core::node::{Node, TransferSpec};
use pdkv_core::plan::{Selection, WireOrder};
use pdkv_core::reference::{ExportKind, Reference};
use pdkv_core::session::check_caches;
use pdkv_core::wire::Withdraw;
use pdkv_core::{Error, ErrorKind, Result};
use pdkv_device::Memory;
use pdkv_device::cuda::Event;

use crate::export::{Export, ExportWatch};
use crate::issue::random_id;
use crate::link::PeerLink;
use crate::peer::Peer;
use crate::pull::PendingMove;
use crate::registry::LocalCache;
use crate::remote::{RegionList, RemoteCache};
use crate::shared::Shared;
use crate::transfer::{Transfer, TransferCore};
use crate::transport::{Direction, Need, pick};

/// How a pull or push is to be done.
#[derive(Clone, Debug)]
pub struct PullOptions {
    /// Position in the export of the first block; the blocks pair by logical position. Default 0.
    pub first_block: u32,
    /// First layer and number of layers. Default: all.
    pub layers: Option<(u32, u32)>,
    /// The digest that this side computed from its own prompt; compared by the owner before a byte
    /// moves. Default: not stated.
    pub digest: Option<Vec<u8>>,
    /// Time the whole transfer may take. Default 30 s.
    pub timeout: Duration,
    /// Only this; anything else is an error, never a fallback.
    pub require: Option<Require>,
    /// Refuse a path on which bytes are staged.
    pub require_direct: bool,
    /// What must have passed on a GPU's stream before a byte is touched: the kernels that write the blocks of a push, or that
    /// still use those a pull writes. `cuda` has its stream wait for it, other transports start later. Default: nothing.
    pub after: Option<Arc<Event>>,
    /// The connection to use. Default: the one to the engine that the reference names.
    pub peer: Option<Peer>,
}

impl Default for PullOptions {
    fn default() -> Self {
        Self {
            first_block: 0,
            layers: None,
            digest: None,
            timeout: Duration::from_secs(30),
            require: None,
            require_direct: false,
            after: None,
            peer: None,
        }
    }
}

/// A KV cache registered with an engine.
#[derive(Clone)]
pub struct KvCache {
    pub(crate) local: Arc<LocalCache>,
    pub(crate) shared: Arc<Shared>,
}

impl KvCache {
    /// Its id within the engine.
    pub fn id(&self) -> CacheId {
        self.local.id
    }

    /// Where its bytes are.
    pub fn layout(&self) -> &KvLayout {
        &self.local.layout
    }

    /// Its memory, by the region numbers of the layout.
    pub fn memory(&self) -> &[Memory] {
        &self.local.memory
    }

    /// What its bytes mean: equal fingerprints can exchange blocks.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.local.fingerprint
    }

    /// Pins blocks for `consumers` peers to read. What a GPU's stream still writes to them must have passed:
    /// [`Event::synchronize`].
    ///
    /// # Errors
    /// `Layout` for blocks out of range, `Capacity`, `Config` for a bad lease or digest, `Closed`.
    pub fn export(
        &self,
        blocks: BlockTable,
        num_tokens: u64,
        digest: &[u8],
        consumers: u32,
        lease: Duration,
    ) -> Result<Export> {
        let spec = self.spec(ExportKind::Export, blocks, num_tokens, digest, consumers, lease)?;
        self.pin(spec, Node::export)
    }

    /// Pins blocks for one peer to write.
    ///
    /// # Errors
    /// As [`export`](Self::export), and `Layout` for a block named twice.
    pub fn offer(&self, blocks: BlockTable, num_tokens: u64, digest: &[u8], lease: Duration) -> Result<Export> {
        blocks.check_unique(self.local.layout.num_blocks())?;
        let spec = self.spec(ExportKind::Offer, blocks, num_tokens, digest, 1, lease)?;
        self.pin(spec, Node::export)
    }

    fn spec(
        &self,
        kind: ExportKind,
        blocks: BlockTable,
        num_tokens: u64,
        digest: &[u8],
        consumers: u32,
        lease: Duration,
    ) -> Result<ExportSpec> {
        Ok(ExportSpec {
            id: random_id("export")?,
            kind,
            cache: self.local.id,
            blocks,
            num_layers: self.local.layout.num_layers(),
            num_tokens,
            digest: digest.to_vec(),
            fingerprint: self.local.fingerprint,
            consumers,
            lease,
        })
    }

    /// Checks what the cache knows and has the node export it by `make`.
    pub(crate) fn pin(
        &self,
        spec: ExportSpec,
        make: impl FnOnce(&mut Node, Duration, ExportSpec) -> Result<Reference>,
    ) -> Result<Export> {
        self.shared.check_open("export")?;
        self.shared.registry.cache(self.local.id)?;
        spec.blocks.validate(self.local.layout.num_blocks())?;
        self.local.still_there()?;
        let room = spec.blocks.len() as u64 * u64::from(self.local.layout.block_tokens());
        if spec.num_tokens > room {
            return Err(Error::new(
                ErrorKind::Layout,
                "export",
                format!(
                    "`{}` tokens are said to be in `{}` blocks, which hold `{room}`",
                    spec.num_tokens,
                    spec.blocks.len()
                ),
            ));
        }
        let id = spec.id;
        let (reference, watch) = self.shared.drive(|state, now| {
            // Once more: after a close that came in between, nobody would end it.
            self.shared.check_open("export")?;
            let reference = make(&mut state.node, now, spec)?;
            let watch = Arc::new(ExportWatch::new(state.node.export_state(id)));
            state.exports.insert(id, Arc::downgrade(&watch));
            Ok::<_, Error>((reference, watch))
        })?;
        Ok(Export::new(reference, watch, &self.shared))
    }

    /// Reads the blocks of an export into our blocks `into`, pairwise from `first_block` on.
    /// Returns at once, or after a round trip where the owner registered the cache this moment; the transfer ends by
    /// its own deadline.
    ///
    /// # Errors
    /// `Layout` (range, duplicates, layouts that mean different things), `ReferenceRestarted`,
    /// `PeerUnreachable` (not connected), `PeerLost`, `TransferTimeout` (that round trip took half a second),
    /// `Unsupported` (no transport), `Closed`. What
    /// the owner refuses is the transfer's error.
    pub fn pull(&self, reference: &Reference, into: BlockTable, options: &PullOptions) -> Result<Transfer> {
        into.check_unique(self.local.layout.num_blocks())?;
        self.begin(ExportKind::Export, reference, into, options)
    }

    /// Writes our `blocks` into the blocks of an offer, pairwise from `first_block` on.
    ///
    /// # Errors
    /// As [`pull`](Self::pull).
    pub fn push(&self, offer: &Reference, blocks: BlockTable, options: &PullOptions) -> Result<Transfer> {
        blocks.validate(self.local.layout.num_blocks())?;
        self.begin(ExportKind::Offer, offer, blocks, options)
    }

    fn begin(
        &self,
        kind: ExportKind,
        reference: &Reference,
        blocks: BlockTable,
        options: &PullOptions,
    ) -> Result<Transfer> {
        let posted = Instant::now();
        let direction = if kind == ExportKind::Export {
            Direction::Read
        } else {
            Direction::Write
        };
        let operation = if kind == ExportKind::Export { "pull" } else { "push" };
        self.shared.check_open(operation)?;
        if reference.kind != kind {
            return Err(Error::new(
                ErrorKind::Config,
                operation,
                format!("the reference is of kind `{}`", reference.kind.as_str()),
            )
            .with_hint("an export is pulled, an offer is pushed to"));
        }
        let link = match &options.peer {
            Some(peer) => Arc::clone(&peer.link),
            None => self.shared.link_for(reference)?,
        };
        check_incarnation(&link, reference)?;
        link.check_alive()?;
        self.local.glance()?;
        let count = check_range(reference, &blocks, options.first_block)?;
        let (remote_cache, remote) = self.remote_cache(&link, reference, options.timeout)?;
        let total_layers = self.local.layout.num_layers();
        let (first_layer, num_layers) = options.layers.unwrap_or((0, total_layers));
        let selection = Selection::layers(first_layer, num_layers);
        selection.validate(&self.local.layout)?;
        let (chosen, path) = {
            let bytes = self
                .local
                .layout
                .layer_block_bytes()
                .saturating_mul(u64::from(num_layers) * u64::from(count));
            let wish = Wish {
                require: options.require,
                require_direct: options.require_direct,
            };
            pick(
                &link.ways,
                &self.local.memory,
                &remote,
                Need {
                    wish,
                    bytes,
                    runs: blocks.runs().len() as u64 * u64::from(num_layers),
                },
            )
        }?;
        let two_sided = !chosen.capability().one_sided;
        let order = two_sided.then(|| WireOrder::natural(&remote_cache.layout));
        let spec = TransferSpec {
            reference: reference.clone(),
            expected_digest: options.digest.clone(),
            expected_fingerprint: self.local.fingerprint,
            first_block: options.first_block,
            num_blocks: count,
            selection: selection.clone(),
            transport: path.transport.as_str().to_owned(),
            timeout: options.timeout,
            wants_table: !two_sided,
            order,
        };
        let pending = PendingMove {
            direction,
            after: options.after.clone(),
            link: chosen,
            layout: Arc::clone(&self.local.layout),
            memory: Arc::clone(&self.local.memory),
            blocks,
            remote_cache,
            remote,
            selection,
            order,
        };
        let core = Arc::new(TransferCore::new(path));
        self.shared
            .begin(link.key, &core, |node, now| node.begin(now, link.key, spec), pending)?;
        core.edit_stats(|stats| stats.post_us = posted.elapsed().as_secs_f64() * 1e6);
        Ok(Transfer::new(core, &self.shared))
    }

    fn remote_cache(
        &self,
        link: &PeerLink,
        reference: &Reference,
        limit: Duration,
    ) -> Result<(Arc<RemoteCache>, RegionList)> {
        let cache = link
            .cache(&self.shared, reference.cache, limit)?
            .ok_or_else(|| link.no_cache(reference.cache))?;
        // Making the advert takes as long as the cache has layers.
        if self.local.fingerprint != cache.advert.fingerprint {
            check_caches(&self.local.advert(), &cache.advert).map_err(|error| {
                error
                    .with_scope(pdkv_core::Scope::Operation)
                    .with_hint("start both sides with the same model, dtype, block size and sharding")
                    .with("peer", &link.remote.name)
            })?;
        }
        let regions = link.remote.cache_regions(&cache)?;
        Ok((cache, regions))
    }

    /// Forgets the cache: its exports are released and peers unmap its memory.
    ///
    /// # Errors
    /// `Region` when it was deregistered before.
    pub fn deregister(&self) -> Result<()> {
        self.shared.check_process("deregister")?;
        let cache = self.shared.registry.remove_cache(self.local.id).ok_or_else(|| {
            Error::new(
                ErrorKind::Region,
                "deregister",
                format!("cache `{}` is not registered", self.local.id),
            )
        })?;
        self.shared.drive(|state, now| state.node.withdraw_cache(now, cache.id));
        for memory in cache.memory.iter() {
            self.shared.ucx.forget(memory);
            self.shared.gpus.forget(memory);
        }
        self.shared.lanes.wake_all();
        self.shared.withdraw(Withdraw {
            regions: cache.regions.clone(),
            caches: vec![cache.id],
        });
        Ok(())
    }
}

fn check_incarnation(link: &PeerLink, reference: &Reference) -> Result<()> {
    if link.remote.incarnation == reference.incarnation {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::ReferenceRestarted,
        "transfer",
        format!(
            "the reference was made by incarnation `{}` of `{}`, the peer is incarnation `{}`",
            reference.incarnation, reference.engine, link.remote.incarnation
        ),
    )
    .with_hint("the owner restarted since; its blocks are gone"))
}

/// How many blocks move: as many as there are places for, which must exist in the export.
fn check_range(reference: &Reference, blocks: &BlockTable, first_block: u32) -> Result<u32> {
    let end = u64::from(first_block) + blocks.len() as u64;
    if end > u64::from(reference.num_blocks) {
        return Err(Error::new(
            ErrorKind::Layout,
            "transfer",
            format!(
                "blocks `{first_block}..{end}` are wanted of an export of `{}`",
                reference.num_blocks
            ),
        )
        .with_hint("`into` names one block of ours for each block of the export, from `first_block` on"));
    }
    Ok(blocks.len() as u32)
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "KvCache({}, {} layers, {} blocks)",
            self.id(),
            self.layout().num_layers(),
            self.layout().num_blocks()
        )
    }
}
