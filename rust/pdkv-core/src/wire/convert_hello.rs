//! Hello messages and adverts to and from the schema. Layouts go through [`KvLayout::from_parts`],
//! which refuses whatever a layout of our own could not be.

use core::time::Duration;

use super::convert::{limited, millis, present, sized};
use super::hello::{
    CacheAdvert, DeviceAdvert, HandshakeRefusal, Hello, HelloAck, HostFacts, Probe, RegionAdvert, SharedExtent,
    StreamHello, StreamPurpose,
};
use super::message::{Advertise, Withdraw};
use super::{MAGIC, MAX_ADVERTS, MAX_FAULT_TEXT, MAX_TEXT, schema, violation};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{CacheId, Incarnation, RegionId, SessionToken};
use crate::layout::{KvLayout, KvLayoutParts, LayerLayout, Plane};
use crate::shard::Shard;

impl From<&Hello> for schema::Hello {
    fn from(m: &Hello) -> Self {
        Self {
            magic: MAGIC.to_owned(),
            min_version: m.min_version,
            max_version: m.max_version,
            features: m.features,
            name: m.name.clone(),
            incarnation: m.incarnation.as_bytes().to_vec(),
            address: m.address.clone(),
            pid: m.host.pid,
            boot_id: m.host.boot_id.clone(),
            pid_namespace: m.host.pid_namespace,
            local_socket: m.host.local_socket.clone(),
            probe: m.host.probe.map(|p| schema::Probe {
                address: p.address,
                nonce: p.nonce.to_vec(),
            }),
            peer_timeout_ms: millis(m.peer_timeout),
            heartbeat_ms: millis(m.heartbeat),
            regions: m.regions.iter().map(Into::into).collect(),
            caches: m.caches.iter().map(Into::into).collect(),
            attempt: m.attempt.to_vec(),
        }
    }
}

impl TryFrom<schema::Hello> for Hello {
    type Error = Error;

    fn try_from(m: schema::Hello) -> Result<Self> {
        if m.magic != MAGIC {
            return Err(violation("the other side does not speak the pdkv protocol"));
        }
        // An empty identity is well-formed here and judged, with every other field, by `session`.
        let incarnation = match m.incarnation.as_slice() {
            [] => Incarnation::new([0; 16]),
            bytes => Incarnation::new(sized(bytes, "hello.incarnation")?),
        };
        Ok(Self {
            min_version: m.min_version,
            max_version: m.max_version,
            features: m.features,
            name: limited(m.name, "hello.name", MAX_TEXT)?,
            incarnation,
            address: limited(m.address, "hello.address", MAX_TEXT)?,
            host: HostFacts {
                pid: m.pid,
                boot_id: limited(m.boot_id, "hello.boot_id", MAX_TEXT)?,
                pid_namespace: m.pid_namespace,
                local_socket: limited(m.local_socket, "hello.local_socket", MAX_TEXT)?,
                probe: match m.probe {
                    None => None,
                    Some(p) => Some(Probe {
                        address: p.address,
                        nonce: sized(&p.nonce, "probe.nonce")?,
                    }),
                },
            },
            peer_timeout: Duration::from_millis(m.peer_timeout_ms),
            heartbeat: Duration::from_millis(m.heartbeat_ms),
            regions: all(m.regions, "hello.regions")?,
            caches: all(m.caches, "hello.caches")?,
            attempt: match m.attempt.as_slice() {
                [] => [0; 16],
                bytes => sized(bytes, "hello.attempt")?,
            },
        })
    }
}

impl From<&HelloAck> for schema::HelloAck {
    fn from(m: &HelloAck) -> Self {
        Self {
            hello: Some((&m.hello).into()),
            version: m.version,
            features: m.features,
            token: m.token.as_bytes().to_vec(),
        }
    }
}

impl TryFrom<schema::HelloAck> for HelloAck {
    type Error = Error;

    fn try_from(m: schema::HelloAck) -> Result<Self> {
        Ok(Self {
            hello: present(m.hello, "hello_ack.hello")?.try_into()?,
            version: m.version,
            features: m.features,
            token: match m.token.as_slice() {
                [] => SessionToken::new([0; 16]),
                bytes => SessionToken::new(sized(bytes, "hello_ack.token")?),
            },
        })
    }
}

impl From<&HandshakeRefusal> for schema::Fault {
    fn from(m: &HandshakeRefusal) -> Self {
        (&super::Fault {
            kind: m.kind,
            message: m.message.clone(),
            hint: String::new(),
        })
            .into()
    }
}

impl TryFrom<schema::Fault> for HandshakeRefusal {
    type Error = Error;

    fn try_from(m: schema::Fault) -> Result<Self> {
        let message = limited(m.message, "handshake_refusal.message", MAX_FAULT_TEXT)?;
        Ok(Self {
            kind: ErrorKind::from_code(m.code),
            message,
        })
    }
}

impl From<&StreamHello> for schema::StreamHello {
    fn from(m: &StreamHello) -> Self {
        Self {
            token: m.token.as_bytes().to_vec(),
            incarnation: m.incarnation.as_bytes().to_vec(),
            index: m.index,
            purpose: m.purpose as u32,
        }
    }
}

impl TryFrom<schema::StreamHello> for StreamHello {
    type Error = Error;

    fn try_from(m: schema::StreamHello) -> Result<Self> {
        Ok(Self {
            token: SessionToken::new(sized(&m.token, "stream_hello.token")?),
            incarnation: Incarnation::new(sized(&m.incarnation, "stream_hello.incarnation")?),
            index: m.index,
            purpose: StreamPurpose::from_code(m.purpose)
                .ok_or_else(|| violation(format!("a data stream has the unknown purpose `{}`", m.purpose)))?,
        })
    }
}

impl From<&RegionAdvert> for schema::Region {
    fn from(m: &RegionAdvert) -> Self {
        Self {
            id: m.id.0,
            len: m.len,
            base_address: m.base_address,
            shared: m.shared.map(|s| schema::Shared {
                offset: s.offset,
                len: s.len,
            }),
            raw_access: m.raw_access,
            name: m.name.clone(),
            device: m.device.as_ref().map(|device| schema::Device {
                uuid: device.uuid.to_vec(),
                sealed: device.sealed.clone(),
                movable: device.movable,
            }),
        }
    }
}

impl TryFrom<schema::Region> for RegionAdvert {
    type Error = Error;

    fn try_from(m: schema::Region) -> Result<Self> {
        if m.base_address.checked_add(m.len).is_none() {
            return Err(violation(format!("region `{}` ends past the address space", m.id)));
        }
        let shared = m.shared.map(|s| SharedExtent {
            offset: s.offset,
            len: s.len,
        });
        if shared.is_some_and(|s| s.offset.checked_add(s.len).is_none_or(|end| end > m.len)) {
            return Err(violation(format!(
                "shared part of region `{}` ends past the region",
                m.id
            )));
        }
        Ok(Self {
            id: RegionId(m.id),
            len: m.len,
            base_address: m.base_address,
            shared,
            raw_access: m.raw_access,
            name: limited(m.name, "region.name", MAX_TEXT)?,
            device: match m.device {
                None => None,
                Some(device) => Some(DeviceAdvert {
                    uuid: sized(&device.uuid, "device.uuid")?,
                    sealed: limited(device.sealed, "device.sealed", MAX_TEXT)?,
                    movable: device.movable,
                }),
            },
        })
    }
}

impl From<&CacheAdvert> for schema::Cache {
    fn from(m: &CacheAdvert) -> Self {
        Self {
            id: m.id.0,
            layout: Some((&m.layout).into()),
            regions: m.regions.iter().map(|r| r.0).collect(),
            shard: Some((&m.shard).into()),
            fingerprint: m.fingerprint.to_vec(),
            model: m.model.clone(),
        }
    }
}

impl TryFrom<schema::Cache> for CacheAdvert {
    type Error = Error;

    fn try_from(m: schema::Cache) -> Result<Self> {
        let layout = KvLayout::try_from(present(m.layout, "cache.layout")?)?;
        let shard = Shard::from(present(m.shard, "cache.shard")?);
        shard
            .validate_for(&layout)
            .map_err(|e| violation(format!("shard of cache `{}` is not valid", m.id)).with_source(e))?;
        if m.regions.len() != layout.region_bytes().len() {
            return Err(violation(format!(
                "cache `{}` names `{}` regions, its layout has `{}`",
                m.id,
                m.regions.len(),
                layout.region_bytes().len()
            )));
        }
        Ok(Self {
            id: CacheId(m.id),
            layout,
            regions: m.regions.into_iter().map(RegionId).collect(),
            shard,
            fingerprint: sized(&m.fingerprint, "cache.fingerprint")?,
            model: limited(m.model, "cache.model", MAX_TEXT)?,
        })
    }
}

impl From<&KvLayout> for schema::Layout {
    fn from(layout: &KvLayout) -> Self {
        let layers = layout
            .layers()
            .iter()
            .zip(layout.layer_names())
            .map(|(layer, name)| schema::Layer {
                name: name.clone(),
                planes: layer
                    .planes
                    .iter()
                    .map(|p| schema::Plane {
                        region: p.region,
                        offset: p.offset,
                    })
                    .collect(),
                block_stride: layer.block_stride,
                head_stride: layer.head_stride,
                token_stride: layer.token_stride,
            });
        Self {
            dtype: layout.dtype() as u32,
            num_blocks: layout.num_blocks(),
            num_heads: layout.num_heads(),
            block_tokens: layout.block_tokens(),
            content_bytes: layout.content_bytes(),
            layers: layers.collect(),
            region_bytes: layout.region_bytes().to_vec(),
            token_rows: layout.token_rows(),
        }
    }
}

impl TryFrom<schema::Layout> for KvLayout {
    type Error = Error;

    fn try_from(m: schema::Layout) -> Result<Self> {
        let dtype = DType::from_code(m.dtype)
            .ok_or_else(|| violation(format!("layout has the unknown dtype `{}`", m.dtype)))?;
        if m.layers.len().max(m.region_bytes.len()) > MAX_ADVERTS {
            return Err(violation("layout has too many layers or regions"));
        }
        let mut names = Vec::with_capacity(m.layers.len());
        let mut layers = Vec::with_capacity(m.layers.len());
        for layer in m.layers {
            names.push(limited(layer.name, "layer.name", MAX_TEXT)?);
            layers.push(LayerLayout {
                planes: layer
                    .planes
                    .iter()
                    .map(|p| Plane {
                        region: p.region,
                        offset: p.offset,
                    })
                    .collect(),
                block_stride: layer.block_stride,
                head_stride: layer.head_stride,
                token_stride: layer.token_stride,
            });
        }
        Self::from_parts(KvLayoutParts {
            dtype,
            num_blocks: m.num_blocks,
            num_heads: m.num_heads,
            block_tokens: m.block_tokens,
            token_rows: m.token_rows,
            content_bytes: m.content_bytes,
            layers,
            layer_names: names,
            region_bytes: m.region_bytes,
        })
        .map_err(|e| violation("the layout of a cache is not valid").with_source(e))
    }
}

impl From<&Shard> for schema::Shard {
    fn from(s: &Shard) -> Self {
        Self {
            first_layer: s.first_layer,
            num_layers: s.num_layers,
            total_layers: s.total_layers,
            first_head: s.first_head,
            num_heads: s.num_heads,
            total_heads: s.total_heads,
            tp_rank: s.tp_rank,
            tp_size: s.tp_size,
            pp_rank: s.pp_rank,
            pp_size: s.pp_size,
        }
    }
}

impl From<schema::Shard> for Shard {
    fn from(s: schema::Shard) -> Self {
        Self {
            first_layer: s.first_layer,
            num_layers: s.num_layers,
            total_layers: s.total_layers,
            first_head: s.first_head,
            num_heads: s.num_heads,
            total_heads: s.total_heads,
            tp_rank: s.tp_rank,
            tp_size: s.tp_size,
            pp_rank: s.pp_rank,
            pp_size: s.pp_size,
        }
    }
}

impl From<&Advertise> for schema::Advertise {
    fn from(m: &Advertise) -> Self {
        Self {
            regions: m.regions.iter().map(Into::into).collect(),
            caches: m.caches.iter().map(Into::into).collect(),
        }
    }
}

impl TryFrom<schema::Advertise> for Advertise {
    type Error = Error;

    fn try_from(m: schema::Advertise) -> Result<Self> {
        Ok(Self {
            regions: all(m.regions, "advertise.regions")?,
            caches: all(m.caches, "advertise.caches")?,
        })
    }
}

impl From<&Withdraw> for schema::Withdraw {
    fn from(m: &Withdraw) -> Self {
        Self {
            regions: m.regions.iter().map(|r| r.0).collect(),
            caches: m.caches.iter().map(|c| c.0).collect(),
        }
    }
}

impl TryFrom<schema::Withdraw> for Withdraw {
    type Error = Error;

    fn try_from(m: schema::Withdraw) -> Result<Self> {
        let count = m.regions.len().max(m.caches.len());
        if count > MAX_ADVERTS {
            return Err(violation(format!(
                "withdraw names `{count}` ids, at most `{MAX_ADVERTS}` are allowed"
            )));
        }
        Ok(Self {
            regions: m.regions.into_iter().map(RegionId).collect(),
            caches: m.caches.into_iter().map(CacheId).collect(),
        })
    }
}

fn all<S, T: TryFrom<S, Error = Error>>(items: Vec<S>, field: &str) -> Result<Vec<T>> {
    if items.len() > MAX_ADVERTS {
        return Err(violation(format!(
            "field `{field}` has `{}` entries, at most `{MAX_ADVERTS}` are allowed",
            items.len()
        )));
    }
    items.into_iter().map(T::try_from).collect()
}
